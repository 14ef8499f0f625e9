package stories

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/localkube"
)

// registration is a command that registers a cluster. It connects to the hub and the member through gates.
type registration struct {
	name string
	// args are the arguments of `sveltosctl register cluster`.
	args []string
	// memberSide means that the command also writes to the member.
	memberSide bool
	// existing means that the cluster is registered before.
	existing bool
}

// TestRegisterFailsEverywhere fails each registration at each of its writes, once with a denied permission and once by
// SIGINT. Then all its objects are deleted, on both sides, and the next attempt succeeds.
func TestRegisterFailsEverywhere(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := w.member("member")
	f := &failureWorld{w: w, member: member, hub: w.startGate(w.hub.Config), memberGate: w.startGate(member.Config)}
	f.writeKubeconfigs()
	f.registerNeighbour()
	for _, r := range []registration{
		{name: "pull", args: []string{"--pullmode", "--labels=env=new"}},
		{name: "pull again", existing: true, args: []string{"--pullmode", "--labels=more=labels", "--revoke"}},
		{name: "pull and apply", memberSide: true, args: []string{"--pullmode", "--apply-to-context=member", "--wait=1m"}},
		{name: "push by kubeconfig", args: []string{"--kubeconfig=" + member.Kubeconfig, "--labels=env=new"}},
		{name: "push by context", memberSide: true, args: []string{"--fleet-cluster-context=member"}},
	} {
		t.Run(r.name, func(t *testing.T) { f.forSubtest(t).failAtEveryWrite(r) })
	}
}

// failureWorld is the world of the story.
type failureWorld struct {
	w               *world
	member          *localkube.Plane
	hub, memberGate *gate
	// kubeconfig has the gates to both planes; its current context is the hub.
	kubeconfig string
}

func (f *failureWorld) forSubtest(t *testing.T) *failureWorld {
	t.Helper()
	inner := *f
	inner.w = f.w.forSubtest(t)
	return &inner
}

func (f *failureWorld) writeKubeconfigs() {
	f.w.t.Helper()
	f.w.writeGateKubeconfig("hub.yaml", f.hub)
	f.w.writeGateKubeconfig("member.yaml", f.memberGate)
	both, err := clientcmd.LoadFromFile(filepath.Join(f.w.dir, "hub.yaml"))
	if err != nil {
		f.w.t.Fatal(err)
	}
	other, err := clientcmd.LoadFromFile(filepath.Join(f.w.dir, "member.yaml"))
	if err != nil {
		f.w.t.Fatal(err)
	}
	both.Clusters["member"], both.Contexts["member"] = other.Clusters["gate"], other.Contexts["gate"].DeepCopy()
	both.Contexts["member"].Cluster = "member"
	raw, err := clientcmd.Write(*both)
	if err != nil {
		f.w.t.Fatal(err)
	}
	f.kubeconfig = f.w.save("both.yaml", string(raw))
}

// registerNeighbour registers another cluster, which creates the objects that all clusters share. It also creates the
// namespace, since Kubernetes needs seconds to delete one.
func (f *failureWorld) registerNeighbour() {
	f.w.t.Helper()
	f.w.run(f.w.hub, "sveltosctl", "register", "cluster", "--namespace=others", "--cluster=neighbour", "--pullmode")
	f.w.kubectl(f.w.hub, "create", "namespace", "failing")
}

func (f *failureWorld) failAtEveryWrite(r registration) {
	f.w.t.Helper()
	args := append([]string{"register", "cluster", "--namespace=failing", "--cluster=unlucky"}, r.args...)
	sides := []string{"hub"}
	if r.memberSide {
		sides = append(sides, "member")
	}
	for _, side := range sides {
		if r.existing {
			f.w.run(f.w.hub, "sveltosctl", "register", "cluster", "--namespace=failing", "--cluster=unlucky", "--pullmode", "--labels=env=old")
			f.w.keptManifest("failing", "unlucky")
		}
		f.awaitStable()
		before, nth := f.snapshot(), 1
		for f.failAt(side, nth, args, before) {
			nth++
		}
		if nth < 3 {
			f.w.t.Errorf("the command made only %d writes to the %s", nth-1, side)
		}
		f.w.t.Logf("failed at each of %d writes to the %s, and then succeeded", nth-1, side)
		// The cluster is deregistered for the next registration.
		f.w.run(f.w.hub, "sveltosctl", "deregister", "cluster", "--namespace=failing", "--cluster=unlucky")
	}
}

// failAt fails the command at its nth write to one side, in both ways. It returns false if the command makes fewer
// writes, and has succeeded.
func (f *failureWorld) failAt(side string, nth int, args, before []string) bool {
	f.w.t.Helper()
	for _, how := range []string{"permission", "SIGINT"} {
		what := fmt.Sprintf("%s at write %d to the %s", how, nth, side)
		run := f.runUntilBlocked(map[string]*gate{"hub": f.hub, "member": f.memberGate}[side], requestMatch{
			program: "sveltosctl/", path: regexp.MustCompile("."), nth: nth, forbidden: how == "permission",
		}, args)
		if !run.reached {
			if run.err != nil {
				f.w.t.Fatalf("%s: the command made no such write, and failed: %v: %s", what, run.err, run.stderr)
			}
			return false
		}
		if wantCode := map[string]int{"permission": 1, "SIGINT": 130}[how]; run.code != wantCode {
			f.w.t.Errorf("%s: exit code %d, want %d: %s", what, run.code, wantCode, run.stderr)
		}
		if lines := errorLines(run.stderr); len(lines) != 1 {
			f.w.t.Errorf("%s: want one line of error, got %q", what, run.stderr)
		}
		if strings.Contains(run.stdout, "kind: Secret") {
			f.w.t.Errorf("%s: a manifest was printed", what)
		}
		f.w.eventually(what+" leaves all objects unchanged", func() error {
			if diff := cmp.Diff(before, f.snapshot()); diff != "" {
				return fmt.Errorf("-before +after:\n%s\n%s", diff, run.stderr)
			}
			return nil
		})
	}
	return true
}

// outcome is the result of one run of the command.
type outcome struct {
	err            error
	code           int
	stdout, stderr string
	// reached means that the command made the request.
	reached bool
}

// runUntilBlocked runs the command. At the request it is interrupted, unless the request is forbidden.
func (f *failureWorld) runUntilBlocked(g *gate, m requestMatch, args []string) outcome {
	f.w.t.Helper()
	t := g.block(m)
	defer g.clear()
	cmd := f.command(args...)
	var stdout, stderr lockedBuffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		f.w.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		select {
		case <-t.reached:
			if !m.forbidden {
				_ = cmd.Process.Signal(os.Interrupt) // an error means that it has ended
			}
		case <-ended:
		}
	}()
	err := cmd.Wait()
	close(ended)
	o := outcome{err: err, code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	select {
	case <-t.reached:
		o.reached = true
	default:
	}
	return o
}

// errorLines returns the errors in the standard error of a command.
func errorLines(stderr string) []string {
	var lines []string
	for line := range strings.Lines(stderr) {
		if strings.HasPrefix(line, "error: ") {
			lines = append(lines, line)
		}
	}
	return lines
}

func (f *failureWorld) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(f.w.t.Context(), f.w.binary("sveltosctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+f.kubeconfig)
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// snapshot lists the objects of both sides by name, with the labels of clusters.
func (f *failureWorld) snapshot() []string {
	f.w.t.Helper()
	kinds := []string{
		"v1/Namespace", "v1/ServiceAccount", "v1/Secret", "coordination.k8s.io/v1/Lease",
		"rbac.authorization.k8s.io/v1/Role", "rbac.authorization.k8s.io/v1/RoleBinding",
		"rbac.authorization.k8s.io/v1/ClusterRole", "rbac.authorization.k8s.io/v1/ClusterRoleBinding",
	}
	found := f.listObjects(f.w.hub, append(kinds, "lib.projectsveltos.io/v1beta1/SveltosCluster")...)
	return append(found, f.listObjects(f.member, append(kinds, "apps/v1/Deployment", "v1/Service")...)...)
}

// listObjects lists the objects of some kinds, except for the namespace terminating and its objects.
func (f *failureWorld) listObjects(plane *localkube.Plane, kinds ...string) []string {
	f.w.t.Helper()
	c := f.w.client(plane)
	var rows []string
	for _, kind := range kinds {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(schema.FromAPIVersionAndKind(path.Dir(kind), path.Base(kind)+"List"))
		if err := c.List(f.w.t.Context(), list); err != nil {
			f.w.t.Fatal(err)
		}
		for _, obj := range list.Items {
			row := fmt.Sprintf("%s: %s %s/%s", plane.Name, path.Base(kind), obj.Namespace, obj.Name)
			if path.Base(kind) == "SveltosCluster" {
				row += fmt.Sprintf(" %v", obj.Labels)
			}
			if obj.DeletionTimestamp != nil {
				row += deletionMark
			}
			if obj.Namespace != "terminating" && obj.Name != "terminating" {
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// deletionMark is in the lines of a snapshot for objects that are being deleted.
const deletionMark = " (going)"

// awaitStable waits until two snapshots in a row are equal, and no object is being deleted.
func (f *failureWorld) awaitStable() {
	f.w.t.Helper()
	last := []string(nil)
	err := wait.PollUntilContextTimeout(f.w.t.Context(), time.Second, waitTimeout, true, func(context.Context) (bool, error) {
		now := f.snapshot()
		same := last != nil && cmp.Equal(last, now) && !strings.Contains(strings.Join(now, ""), deletionMark)
		last = now
		return same, nil
	})
	if err != nil {
		f.w.t.Fatalf("the objects still change: %v", err)
	}
}

// TestRegisterFailsClearly runs the command with invalid input. Each attempt prints one line on standard error that
// names the mistake, and leaves no object.
func TestRegisterFailsClearly(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	member := localkube.ForTest(t, localkube.Named("member"))
	f := &failureWorld{w: w, member: member, kubeconfig: w.hub.Kubeconfig}
	f.registerNeighbour()
	w.apply(w.hub, failingGround)
	w.kubectl(w.hub, "delete", "namespace", "terminating", "--wait=false")
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace=taken", "--cluster=pushed", "--kubeconfig="+member.Kubeconfig)
	w.awaitReady("taken", "pushed")
	const unreachable = "https://127.0.0.1:1"
	good := readFile(t, member.Kubeconfig)
	saved := func(name, text string) string { return "--kubeconfig=" + w.save(name, text) }
	f.awaitStable()
	before := f.snapshot()
	for name, tc := range map[string]struct {
		args []string
		env  string
		want []string
	}{
		"hub down":              {args: []string{"--namespace=a", "--cluster=b", "--pullmode"}, env: w.save("down.yaml", strings.ReplaceAll(readFile(t, w.hub.Kubeconfig), w.hub.Config.Host, unreachable)), want: []string{"refused"}},
		"name taken by push":    {args: []string{"--namespace=taken", "--cluster=pushed", "--pullmode"}, want: []string{"taken/pushed", "push mode", "deregister"}},
		"name taken by another": {args: []string{"--namespace=taken", "--cluster=foreign", "--pullmode"}, want: []string{"ServiceAccount", "taken/foreign"}},
		"namespace terminating": {args: []string{"--namespace=terminating", "--cluster=b", "--pullmode"}, want: []string{"terminating"}},
		"terminating, push":     {args: []string{"--namespace=terminating", "--cluster=b", "--kubeconfig=" + member.Kubeconfig}, want: []string{"terminating"}},
		"no kubeconfig":         {args: []string{"--namespace=a", "--cluster=b"}, want: []string{"either kubeconfig or fleet-cluster-context must be specified"}},
		"not a kubeconfig":      {args: []string{"--namespace=a", "--cluster=b", saved("garbage.yaml", "hello: [")}, want: []string{"--kubeconfig"}},
		"exec plugin": {args: []string{"--namespace=a", "--cluster=b", saved("exec.yaml", withUser(good, "    exec: {apiVersion: client.authentication.k8s.io/v1, command: aws, interactiveMode: Never}"))},
			want: []string{"--kubeconfig", "aws"}},
		"points at a file": {args: []string{"--namespace=a", "--cluster=b", saved("file.yaml", withUser(good, "    client-certificate: /etc/me.crt"))}, want: []string{"--kubeconfig", "/etc/me.crt"}},
		"member down":      {args: []string{"--namespace=a", "--cluster=b", saved("nobody.yaml", strings.ReplaceAll(good, member.Config.Host, unreachable))}, want: []string{"--kubeconfig", unreachable}},
		"no such context":  {args: []string{"--namespace=a", "--cluster=b", "--fleet-cluster-context=nowhere"}, want: []string{"nowhere"}},
		"bad labels":       {args: []string{"--namespace=a", "--cluster=b", "--pullmode", "--labels=x"}, want: []string{"invalid key-value pair format: x"}},
		"bad token life":   {args: []string{"--namespace=a", "--cluster=b", "--pullmode", "--token-lifetime=1m"}, want: []string{"--token-lifetime", "10m"}},
		"bad proxy":        {args: []string{"--namespace=a", "--cluster=b", "--pullmode", "--proxy-url=proxy:3128"}, want: []string{"--proxy-url"}},
		"bad address":      {args: []string{"--namespace=a", "--cluster=b", "--pullmode", "--management-cluster-url=http://hub"}, want: []string{"--management-cluster-url"}},
		"pull flag, push":  {args: []string{"--namespace=a", "--cluster=b", "--kubeconfig=" + member.Kubeconfig, "--revoke"}, want: []string{"--revoke"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := f.command(append([]string{"register", "cluster"}, tc.args...)...)
			if tc.env != "" {
				cmd.Env = append(cmd.Env, "KUBECONFIG="+tc.env)
			}
			var stdout, stderr lockedBuffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			if err := cmd.Run(); err == nil || cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("the command ended with %v, want exit code 1", err)
			}
			if got := stdout.String(); got != "" {
				t.Errorf("standard output %q, want none", got)
			}
			lines := errorLines(stderr.String())
			if len(lines) != 1 {
				t.Fatalf("want one line of error, got %q", stderr.String())
			}
			for _, text := range tc.want {
				if !strings.Contains(lines[0], text) {
					t.Errorf("error is %q, want %q in it", lines[0], text)
				}
			}
			if diff := cmp.Diff(before, f.snapshot()); diff != "" {
				t.Errorf("objects (-before +after):\n%s", diff)
			}
		})
	}
}

const failingGround = `
apiVersion: v1
kind: Namespace
metadata: {name: taken}
---
apiVersion: v1
kind: ServiceAccount
metadata: {namespace: taken, name: foreign}
---
apiVersion: v1
kind: Namespace
metadata: {name: terminating}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: terminating, name: held, finalizers: [example.com/held]}
`

func readFile(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// withUser returns a kubeconfig whose user has other credentials.
func withUser(kubeconfig, credentials string) string {
	return regexp.MustCompile(`(?ms)^users:.*?user:\n(\s+\S+: .*?\n)+`).ReplaceAllStringFunc(kubeconfig, func(users string) string {
		head, _, _ := strings.Cut(users, "user:\n")
		return head + "user:\n" + credentials + "\n"
	})
}
