package check_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/check"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
)

// names returns the names that the script gets, sorted, as its message.
const names = `
function evaluate()
  local names = {}
  for _, r in ipairs(resources) do names[#names+1] = r.metadata.name .. "=" .. r.data.state end
  table.sort(names)
  return {pass = false, message = table.concat(names, " ")}
end`

func TestRunSelectsObjects(t *testing.T) {
	t.Parallel()
	reader, ns := member(t)
	configMaps := func(change func(*libv1beta1.ResourceSelector)) []libv1beta1.ResourceSelector {
		selector := libv1beta1.ResourceSelector{Version: "v1", Kind: "ConfigMap", Namespace: ns, LabelFilters: []libv1beta1.LabelFilter{{Key: "t", Operation: "Has"}}}
		change(&selector)
		return []libv1beta1.ResourceSelector{selector}
	}
	filter := func(operation libv1beta1.Operation, value string) func(*libv1beta1.ResourceSelector) {
		return func(s *libv1beta1.ResourceSelector) {
			s.LabelFilters = append(s.LabelFilters, libv1beta1.LabelFilter{Key: "tier", Operation: operation, Value: value})
		}
	}
	tests := map[string]struct {
		selectors []libv1beta1.ResourceSelector
		want      string
	}{
		"by kind":         {configMaps(func(*libv1beta1.ResourceSelector) {}), "one=gold two=tin"},
		"by name":         {configMaps(func(s *libv1beta1.ResourceSelector) { s.Name = "two" }), "two=tin"},
		"label equal":     {configMaps(filter("Equal", "gold")), "one=gold"},
		"label different": {configMaps(filter("Different", "gold")), "two=tin"},
		"label absent":    {configMaps(filter("DoesNotHave", "")), "the check does not pass, and its script returns no message"},
		"by script": {configMaps(func(s *libv1beta1.ResourceSelector) {
			s.Evaluate = `function evaluate() return {matching = obj.data.state == "tin"} end`
		}), "two=tin"},
		"by a script that is wrong": {
			configMaps(func(s *libv1beta1.ResourceSelector) { s.Evaluate = `function evaluate() return {pass = true} end` }),
			`resourceSelectors[0].evaluate: invalid script: the table that evaluate returns has no field "matching"`,
		},
		"by CEL": {
			configMaps(func(s *libv1beta1.ResourceSelector) { s.EvaluateCEL = []libv1beta1.CELRule{{Name: "x", Rule: "true"}} }),
			"resourceSelectors[0].evaluateCEL is not supported; use evaluate",
		},
		"a kind that is not served": {[]libv1beta1.ResourceSelector{{Group: "example.com", Version: "v1", Kind: "Boat"}}, "the check does not pass, and its script returns no message"},
		"two selectors":             {append(configMaps(filter("Equal", "gold")), configMaps(filter("Equal", "tin"))...), "one=gold two=tin"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := checker.Run(t.Context(), reader, []libv1beta1.ClusterCheck{{Name: "c", ResourceSelectors: tc.selectors, Condition: names}})
			if want := "check c: " + tc.want; err != nil || got != want {
				t.Errorf("Run() = %q, %v, want %q", got, err, want)
			}
		})
	}
}

func TestRunReflectsTheCluster(t *testing.T) {
	t.Parallel()
	reader, ns := member(t)
	nodes := libv1beta1.ClusterCheck{
		Name: "nodes", ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "Node"}},
		Condition: `
function evaluate()
  local hs = {pass = false, message = "no node is ready"}
  for _, node in ipairs(resources) do
    for _, condition in ipairs(node.status.conditions or {}) do
      if condition.type == "Ready" and condition.status == "True" then hs.pass = true end
    end
  end
  return hs
end`,
	}
	three := libv1beta1.ClusterCheck{
		Name: "three", ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "ConfigMap", Namespace: ns, LabelFilters: []libv1beta1.LabelFilter{{Key: "t", Operation: "Has"}}}},
		Condition: `function evaluate() return {pass = #resources == 2, message = "there are " .. #resources} end`,
	}
	if got, err := checker.Run(t.Context(), reader, []libv1beta1.ClusterCheck{nodes, three}); got != "" || err != nil {
		t.Errorf("Run() = %q, %v, want all to pass", got, err)
	}
	list := &libv1beta1.ClusterCheck{}
	three.DeepCopyInto(list)
	list.ResourceSelectors[0].Name = "one"
	if got, err := checker.Run(t.Context(), reader, []libv1beta1.ClusterCheck{nodes, *list}); got != "check three: there are 1" || err != nil {
		t.Errorf("Run() = %q, %v", got, err)
	}
}

func TestRunFailsOtherwise(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ script, want string }{
		"no script":            {"", "condition: invalid script: function evaluate is missing"},
		"a syntax error":       {"function evaluate(", "condition: invalid script: at EOF: syntax error"},
		"no table":             {"function evaluate() return true end", "condition: invalid script: evaluate returns a boolean, not a table"},
		"nothing":              {"function evaluate() end", "condition: invalid script: evaluate returns a nil, not a table"},
		"no pass":              {"function evaluate() return {result = true} end", `condition: invalid script: the table that evaluate returns has no field "pass"`},
		"pass is text":         {`function evaluate() return {pass = "true"} end`, `condition: invalid script: field "pass" of the table that evaluate returns is a string, not a bool`},
		"an error":             {"function evaluate()\n return {pass = resources[1].x.y} end", "condition: invalid script: line 2: attempt to index a non-table object(nil) with key 'x'"},
		"a raised table":       {"function evaluate() error({}) end", "condition: invalid script: it raised a value that is not text"},
		"a long message":       {`function evaluate() return {pass = false, message = string.rep("é", 1000)} end`, strings.Repeat("é", 506) + "..."},
		"a message of lines":   {`function evaluate() return {pass = false, message = "a\n\t\255b"} end`, "a ?b"},
		"files":                {"function evaluate() return {pass = io.open('/etc/passwd') ~= nil} end", "condition: invalid script: line 1: attempt to index a non-table object(nil) with key 'open'"},
		"the system":           {"function evaluate() os.exit(1) end", "condition: invalid script: line 1: attempt to index a non-table object(nil) with key 'exit'"},
		"code from files":      {"function evaluate() dofile('/x') end", "condition: invalid script: line 1: attempt to call a non-function object"},
		"code from text":       {"function evaluate() loadstring('x=1')() end", "condition: invalid script: line 1: attempt to call a non-function object"},
		"an endless loop":      {"function evaluate() while true do pcall(function() while true do end end) end end", "condition: line 1: the script took more than 5000000 steps"},
		"an endless recursion": {"function evaluate() evaluate() return 1 end", "condition: invalid script: line 1: stack overflow"},
		"text without end":     {`function evaluate() local s = "xxxx" while true do s = s .. s end end`, "condition: invalid script: line 1: the script makes more than 67108864 bytes of text"},
		"repeated text":        {`function evaluate() return ("x"):rep(1e9) end`, "condition: invalid script: line 1: the script makes more than 67108864 bytes of text"},
		"wide numbers":         {`function evaluate() return string.format("%999999d", 1) end`, "condition: invalid script: line 1: invalid format (width or precision)"},
		"a runaway pattern": {
			`function evaluate() return string.find(("a"):rep(1000), "a*a*a*a*b") end`,
			"condition: invalid script: line 1: the pattern \"a*a*a*a*b\" may take too long over a text of 1000 bytes",
		},
		"a pattern of few signs": {
			`function evaluate() return string.find(string.rep("a", 2100), ".-.-b") end`,
			"condition: invalid script: line 1: the pattern \".-.-b\" may take too long over a text of 2100 bytes",
		},
		"a runaway set": {
			`function evaluate() return string.match(string.rep("a-]", 700), "[]%a-]*[^b]+[%]a-]-b") end`,
			"condition: invalid script: line 1: the pattern \"[]%a-]*[^b]+[%]a-]-b\" may take too long over a text of 2100 bytes",
		},
		"a long pattern":   {`function evaluate() return ("a"):match(("a?"):rep(1000)) end`, "condition: invalid script: line 1: the pattern is longer than 1024 bytes"},
		"doubled choices":  {`function evaluate() return ("a"):rep(30):match(("a?"):rep(30) .. "b") end`, "condition: invalid script: line 1: the pattern "},
		"repeated scans":   {`function evaluate() return ("("):rep(9000):match("%b()") end`, "condition: invalid script: line 1: the pattern \"%b()\" may take too long"},
		"too many matches": {`function evaluate() return ("a"):rep(4e5):gmatch("a") end`, "condition: invalid script: line 1: the pattern \"a\" may match too often in a text of 400000 bytes"},
		"long replacements": {
			`function evaluate() return ("a"):rep(10000):gsub("a", ("b"):rep(1000)) end`,
			"condition: invalid script: line 1: replacing \"a\" may take too long in a text of 10000 bytes",
		},
		"a sort without end": {
			`function evaluate()
			  local t, s = {}, ("x"):rep(10000000)
			  for i = 1, 5 do local own = s .. i for j = 1, 20000 do t[#t+1] = own end end
			  table.sort(t)
			end`, "condition: the script took longer than 5s",
		},
		"tables that are kept": {"function evaluate() local t = {} for i = 1, 1e5 do t[i] = {} t[i][100000] = 1 end end", "condition: the script took "}, // too much memory or, on a busy machine, too long
		"tables without end":   {"function evaluate() local t = {} for i = 1, 1e6 do t[i] = {} t[i][1000000] = 1 end end", "condition: the script took "},
	}
	for name, tc := range tests {
		before := time.Now()
		got, err := checker.Run(t.Context(), nil, []libv1beta1.ClusterCheck{{Name: "c", Condition: tc.script}})
		// Much longer than the timeout of one script, because the machine may be busy.
		if took := time.Since(before); took > 3*time.Minute {
			t.Errorf("%s: Run() took %s", name, took)
		}
		if want := "check c: " + tc.want; err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s: Run() = %q, %v, want %q", name, got, err, want)
		}
	}
}

func TestScriptsHaveTheirLibraries(t *testing.T) {
	t.Parallel()
	for _, condition := range []string{
		`("a-b"):gsub("%-", "+") == "a+b"`,
		`string.format("%s %5.2f %d", "x", 1.5, 3) == "x  1.50 3"`,
		`("v1.36.3"):match("^v(%d+)%.(%d+)") == "1"`,
		`string.find("a.b", ".", 1, true) == 2`,
		`("x "):rep(5000):match("(%d+)%.(%d+)%.(%d+)") == nil`,
		`(("k=v, "):rep(500) .. "version=1.2"):match("version=([%w.-]+)$") == "1.2"`,
		`(("a "):rep(500)):gsub("%s+", "_"):len() == 1000`,
		`(function() local t = {3, 1, 2} table.sort(t) return t[1] == 1 and t[3] == 3 end)()`,
		`(function() local t = {3, 1, 2} table.sort(t, function(a, b) return a > b end) return t[1] == 3 end)()`,
		`string.rep("ab", 3) == "ababab" and ("x"):upper() == "X"`,
		`table.concat({1, 2, 3}, ",", 2, 3) == "2,3" and 1 .. "" == "1"`,
		`math.max(1, 2) == 2 and tonumber("3") == 3 and tostring(nil) == "nil"`,
		`(function() local n = 0 for w in ("a b c"):gmatch("%a") do n = n + 1 end return n end)() == 3`,
		`(function() for i = 1, 200 do local t = {} t[20000] = 1 end return true end)()`, // garbage does not count
		`select("#", 1, 2) == 2 and ("a" .. "b" .. "c"):len() == 3`,
	} {
		script := "function evaluate() return {pass = " + condition + `, message = "it is not so"} end`
		got, err := checker.Run(t.Context(), nil, []libv1beta1.ClusterCheck{{Name: "c", Condition: script}})
		for i := 0; i < 5 && strings.Contains(got, "took longer than"); i++ { // the machine is busy
			got, err = checker.Run(t.Context(), nil, []libv1beta1.ClusterCheck{{Name: "c", Condition: script}})
		}
		if got != "" || err != nil {
			t.Errorf("%s: Run() = %q, %v", condition, got, err)
		}
	}
}

func TestRunReturnsErrorsOfRequests(t *testing.T) {
	t.Parallel()
	nobody, err := check.NewReader(&rest.Config{Host: "https://127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	pods := []libv1beta1.ClusterCheck{{Name: "c", Condition: names, ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "Pod"}}}}
	if got, err := checker.Run(t.Context(), nobody, pods); got != "" || err == nil || !strings.HasPrefix(err.Error(), "check c: list Pod: ") {
		t.Errorf("Run() = %q, %v, want an error", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	<-ctx.Done()
	endless := []libv1beta1.ClusterCheck{{Name: "c", Condition: "function evaluate() while true do end end"}}
	if got, err := checker.Run(ctx, nil, endless); got != "" || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Run() = %q, %v, want the end of its context", got, err)
	}
}

// TestMemoryOfTheProcessDoesNotCount runs a check while the process itself, for example a rollout, takes much memory.
func TestMemoryOfTheProcessDoesNotCount(t *testing.T) {
	t.Parallel()
	ended, grown := make(chan struct{}), make(chan [][]byte)
	go func() {
		var kept [][]byte
		for {
			select {
			case <-ended:
				grown <- kept
				return
			default:
				if len(kept) < 400 {
					kept = append(kept, bytes.Repeat([]byte("x"), 1<<20))
				}
			}
		}
	}()
	script := "function evaluate() local n = 0 for i = 1, 1000000 do n = n + 1 end return {pass = n == 1000000} end"
	got, err := checker.Run(t.Context(), nil, []libv1beta1.ClusterCheck{{Name: "c", Condition: script}})
	close(ended)
	if got != "" || err != nil {
		t.Errorf("Run() = %q, %v while the process took %d MiB", got, err, len(<-grown))
	}
}

// readerOf returns a reader of a cluster that serves Pods, and API version m.example.com/v1 by the other handler.
func readerOf(t *testing.T, pods, other http.HandlerFunc) client.Reader {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/api/v1", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprint(w, `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"pods/log","kind":"Pod"},{"name":"pods","kind":"Pod","namespaced":true}]}`)
	})
	mux.HandleFunc("/api/v1/pods", pods)
	mux.HandleFunc("/apis/m.example.com/v1", other)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	reader, err := check.NewReader(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return reader
}

// TestKindsOfOtherVersions has an API version that fails, takes too long, or returns too much. Checks of its kinds
// fail, and not as if there were no objects; checks of other kinds do not notice it.
func TestKindsOfOtherVersions(t *testing.T) {
	t.Parallel()
	checkOf := func(count int, selector libv1beta1.ResourceSelector) []libv1beta1.ClusterCheck {
		condition := fmt.Sprintf(`function evaluate() return {pass = #resources == %d} end`, count)
		return []libv1beta1.ClusterCheck{{Name: "c", Condition: condition, ResourceSelectors: []libv1beta1.ResourceSelector{selector}}}
	}
	for name, test := range map[string]struct {
		other http.HandlerFunc
		want  string
	}{
		"fails":         {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }, "check c: list M: "},
		"never answers": {func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, "check c: list M: "},
		"has many kinds": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = fmt.Fprint(w, `{"resources":[`+strings.Repeat("{},", 900_000))
		}, "800000 values"},
		"has no such kind": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = fmt.Fprint(w, `{"kind":"APIResourceList","resources":[{"name":"ns","kind":"N"}]}`)
		}, "<nil>"},
		"is not served": {http.NotFound, "<nil>"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pods := func(w http.ResponseWriter, _ *http.Request) {
				_, _ = fmt.Fprint(w, `{"kind":"PodList","apiVersion":"v1","items":[{"metadata":{"name":"p"}}]}`)
			}
			reader := readerOf(t, pods, test.other)
			for _, pod := range []libv1beta1.ResourceSelector{{Version: "v1", Kind: "Pod"}, {Version: "v1", Kind: "pod"}} {
				if got, err := checker.Run(t.Context(), reader, checkOf(1, pod)); got != "" || err != nil {
					t.Errorf("%+v: Run() = %q, %v", pod, got, err)
				}
			}
			got, err := checker.Run(t.Context(), reader, checkOf(0, libv1beta1.ResourceSelector{Group: "m.example.com", Version: "v1", Kind: "M"}))
			if got != "" || !strings.Contains(fmt.Sprint(err), test.want) {
				t.Errorf("Run() = %q, %v, want %s", got, err, test.want)
			}
		})
	}
}

// TestEndlessPages lists the objects of a cluster that returns pages without end.
func TestEndlessPages(t *testing.T) {
	t.Parallel()
	pages := 0
	reader := readerOf(t, func(w http.ResponseWriter, _ *http.Request) {
		pages++
		pod := fmt.Sprintf(`{"metadata":{"name":"p","annotations":{"a":%q}}}`, strings.Repeat("x", 1<<20))
		_, _ = fmt.Fprintf(w, `{"kind":"PodList","apiVersion":"v1","metadata":{"continue":"next"},"items":[%s]}`, pod)
	}, http.NotFound)
	pods := []libv1beta1.ClusterCheck{{Name: "c", Condition: names, ResourceSelectors: []libv1beta1.ResourceSelector{{Version: "v1", Kind: "Pod"}}}}
	got, err := checker.Run(t.Context(), reader, pods)
	if want := "check c: list Pod: the objects have more than 16 MiB"; got != "" || err == nil || err.Error() != want || pages > 17 {
		t.Errorf("Run() = %q, %v after %d pages, want %s", got, err, pages, want)
	}
}

// TestNoScriptAfterTheEnd has a check whose script passes, after the time for all checks of the cluster.
func TestNoScriptAfterTheEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, script := range map[string]string{"passing": "function evaluate() return {pass = true} end", "failing": "function evaluate() return {pass = false} end"} {
		got, err := checker.Run(ctx, nil, []libv1beta1.ClusterCheck{{Name: "c", Condition: script}})
		if got != "" || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: Run() = %q, %v, want the end of its context", name, got, err)
		}
	}
}

// TestManySelectors has a check that selects the same objects again and again.
func TestManySelectors(t *testing.T) {
	t.Parallel()
	requests := 0
	reader := readerOf(t, func(w http.ResponseWriter, _ *http.Request) {
		requests++
		_, _ = fmt.Fprintf(w, `{"kind":"PodList","apiVersion":"v1","items":[{"metadata":{"name":"p","annotations":{"a":%q}}}]}`, strings.Repeat("x", 5<<20))
	}, http.NotFound)
	selectors := make([]libv1beta1.ResourceSelector, 100)
	for i := range selectors {
		selectors[i] = libv1beta1.ResourceSelector{Version: "v1", Kind: "Pod"}
	}
	got, err := checker.Run(t.Context(), reader, []libv1beta1.ClusterCheck{{Name: "c", Condition: names, ResourceSelectors: selectors}})
	if want := "check c: the objects of its selectors have more than 16 MiB"; got != "" || err == nil || err.Error() != want || requests != 4 {
		t.Errorf("Run() = %q, %v after %d requests, want %s", got, err, requests, want)
	}
}

// TestChecksThatCannotBeRun wants an error, and no failure of the cluster, if no process can be started.
func TestChecksThatCannotBeRun(t *testing.T) {
	t.Parallel()
	broken := check.Checker{Sandbox: sandbox.NewPool([]string{"/does/not/exist"}, clock.RealClock{})}
	checks := []libv1beta1.ClusterCheck{{Name: "c", Condition: "function evaluate() return {pass = false, message = \"no\"} end"}}
	for _, ready := range []bool{false, true} {
		spec := &libv1beta1.SveltosClusterSpec{LivenessChecks: checks}
		if !ready {
			spec = &libv1beta1.SveltosClusterSpec{ReadinessChecks: checks}
		}
		if got, err := broken.EvaluateCluster(t.Context(), nil, spec, ready); !errors.Is(err, sandbox.ErrStart) || got.Failure != "" {
			t.Errorf("ready %t: got %+v, error %v, want ErrStart", ready, got, err)
		}
	}
}

// TestChecksWithoutMemory wants an error, and no failure of the cluster, if the hub has no memory for the messages of a
// script. It changes the memory limit of this process, so it does not run in parallel.
func TestChecksWithoutMemory(t *testing.T) { //nolint:paralleltest // see above
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(1 << 30))
	pool := sandbox.NewPool([]string{os.Args[0], serve}, clock.RealClock{})
	withoutMemory := check.Checker{Sandbox: pool, Cluster: client.ObjectKey{Namespace: "eu", Name: "one"}}
	used := pool.Memory().Reserve("eu")
	t.Cleanup(used.Release)
	const step = 32 << 20
	for used.Add(step) == nil {
	}
	// The checks have 512 KiB that need no reservation.
	script := "function evaluate() return {pass = true} end --" + strings.Repeat("x", 1<<20)
	spec := &libv1beta1.SveltosClusterSpec{LivenessChecks: []libv1beta1.ClusterCheck{{Name: "c", Condition: script}}}
	if got, err := withoutMemory.EvaluateCluster(t.Context(), nil, spec, true); !kube.IsMemoryError(err) || got.Failure != "" {
		t.Errorf("got %+v, error %v, want an error because of the memory", got, err)
	}
}

// TestWrongIndexes has a child that returns an index which no object has.
func TestWrongIndexes(t *testing.T) {
	t.Parallel()
	reader, ns := member(t)
	wrong := check.Checker{Sandbox: sandbox.NewPool([]string{os.Args[0], serveWrong}, clock.RealClock{})}
	selector := libv1beta1.ResourceSelector{Version: "v1", Kind: "ConfigMap", Namespace: ns, Evaluate: "function evaluate() end"}
	got, err := wrong.Run(t.Context(), reader, []libv1beta1.ClusterCheck{{Name: "c", Condition: names, ResourceSelectors: []libv1beta1.ResourceSelector{selector}}})
	if want := "check c: resourceSelectors[0].evaluate: the sandbox returned index 7 of "; err != nil || !strings.HasPrefix(got, want) {
		t.Errorf("Run() = %q, %v, want %s...", got, err, want)
	}
}

// TestLimitsOfSeveralClusters has a script that ends its process for each cluster.
func TestLimitsOfSeveralClusters(t *testing.T) {
	t.Parallel()
	started := filepath.Join(t.TempDir(), "started")
	pool := sandbox.NewPool([]string{"/bin/sh", "-c", "echo >> " + started}, clock.RealClock{})
	for _, step := range []struct {
		cluster client.ObjectKey
		want    int
	}{
		{client.ObjectKey{Namespace: "eu", Name: "a"}, 1},
		{client.ObjectKey{Namespace: "eu", Name: "b"}, 2},
		{client.ObjectKey{Namespace: "eu", Name: "c"}, 2},
		{client.ObjectKey{Namespace: "us", Name: "a"}, 3},
	} {
		checker := check.Checker{Sandbox: pool, Cluster: step.cluster}
		if got, err := checker.Run(t.Context(), nil, []libv1beta1.ClusterCheck{{Name: "c"}}); got == "" || err != nil {
			t.Errorf("%s: Run() = %q, %v, want a failure", step.cluster, got, err)
		}
		raw, err := os.ReadFile(started)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(raw); got != step.want {
			t.Errorf("%s: %d processes were started, want %d", step.cluster, got, step.want)
		}
	}
}

// TestLongFailureOfCluster has a message whose prefix makes it too long.
func TestLongFailureOfCluster(t *testing.T) {
	t.Parallel()
	script := `function evaluate() return {pass = false, message = string.rep("x", 2000)} end`
	spec := &libv1beta1.SveltosClusterSpec{ReadinessChecks: []libv1beta1.ClusterCheck{{Name: "c", Condition: script}}}
	got, err := checker.EvaluateCluster(t.Context(), nil, spec, false)
	if err != nil || len(got.Failure) != 1024 || !strings.HasPrefix(got.Failure, "readiness check c: xxx") {
		t.Errorf("got %d bytes, error %v: %s", len(got.Failure), err, got.Failure)
	}
}
