package engine_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

var clusterRoles = schema.GroupVersionResource{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "clusterroles"}

// aggregationManager is the field manager of Kubernetes' clusterrole-aggregation controller.
const aggregationManager = "clusterrole-aggregation-controller"

// gatheredRoles are the suffixes of the names of the ClusterRoles whose rules the aggregating ClusterRole of
// aggregatedChart gathers.
var gatheredRoles = []string{"core", "jobs", "reports", "view", "additional"}

// aggregatedChart returns objects like those of Kyverno's background controller. Their names begin with the test's
// namespace.
func (c *cluster) aggregatedChart() []*unstructured.Unstructured {
	c.t.Helper()
	var manifest strings.Builder
	manifest.WriteString(`
apiVersion: v1
kind: ServiceAccount
metadata: {name: background-controller, namespace: NS}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "NS:background-controller", labels: {app: NS}}
aggregationRule:
  clusterRoleSelectors:
  - matchLabels: {aggregate-to-background-controller: NS}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: "NS:background-controller"}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "NS:background-controller"}
subjects:
- {kind: ServiceAccount, name: background-controller, namespace: NS}
`)
	for _, name := range gatheredRoles {
		fmt.Fprintf(&manifest, `---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: "NS:background-controller:%[1]s", labels: {app: NS, aggregate-to-background-controller: NS}}
rules:
- {apiGroups: [""], resources: [configmaps], resourceNames: [%[1]s], verbs: [get]}
`, name)
	}
	return decode(c.t, strings.ReplaceAll(manifest.String(), "NS", c.ns))
}

func (c *cluster) aggregatingRole() string { return c.ns + ":background-controller" }

// clusterRoleNames lists the names of the existing ClusterRoles of aggregatedChart.
func (c *cluster) clusterRoleNames() []string {
	c.t.Helper()
	list, err := c.objects.Resource(clusterRoles).List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	var names []string
	for _, role := range list.Items {
		if strings.HasPrefix(role.GetName(), c.ns+":") {
			names = append(names, role.GetName())
		}
	}
	return names
}

// wantNoClusterRoles checks that no ClusterRole of aggregatedChart is left.
func (c *cluster) wantNoClusterRoles() {
	c.t.Helper()
	if names := c.clusterRoleNames(); len(names) > 0 {
		role := c.get(clusterRoles, "", names[0])
		c.t.Errorf("ClusterRoles are left: %v; the first: %v", names, role)
	}
}

func (c *cluster) patchClusterRole(name, body string) {
	c.t.Helper()
	_, err := c.objects.Resource(clusterRoles).Patch(c.t.Context(), name, types.MergePatchType, []byte(body),
		metav1.PatchOptions{FieldManager: "another"})
	if err != nil {
		c.t.Fatal(err)
	}
}

// wantAggregated waits until the aggregation controller has written the rules of all gathered roles.
func (c *cluster) wantAggregated() {
	c.t.Helper()
	eventually(c.t, "rules are aggregated", func() bool {
		role := c.get(clusterRoles, "", c.aggregatingRole())
		if role == nil {
			return false
		}
		rules, _, err := unstructured.NestedSlice(role.Object, "rules")
		return err == nil && len(rules) == len(gatheredRoles)
	})
}

const staleRules = `, "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]`

// applyStale sends the apply request of an aggregation controller whose cache still has the deleted aggregating role.
// content is the JSON of the role after its metadata.
func (c *cluster) applyStale(content string) {
	c.t.Helper()
	force := true
	body := fmt.Sprintf(`{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": %q}%s}`,
		c.aggregatingRole(), content)
	opts := metav1.PatchOptions{FieldManager: aggregationManager, Force: &force}
	_, err := c.objects.Resource(clusterRoles).Patch(c.t.Context(), c.aggregatingRole(), types.ApplyPatchType, []byte(body), opts)
	if err != nil {
		c.t.Error(err)
	}
}

// hook is called for the first request with this method for a ClusterRole. The request fails with the hook's error.
type hook struct {
	method, role  string
	before, after func() error
}

// intercept returns an Engine whose requests call hooks.
func (c *cluster) intercept(hooks ...hook) *engine.Engine {
	c.t.Helper()
	cfg := rest.CopyConfig(c.cfg)
	for _, h := range hooks {
		cfg.Wrap(h.wrap)
	}
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		c.t.Fatal(err)
	}
	return e
}

func (h hook) wrap(next http.RoundTripper) http.RoundTripper {
	var once sync.Once
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		matched := false
		if r.Method == h.method && strings.HasSuffix(r.URL.Path, "/clusterroles/"+h.role) {
			once.Do(func() { matched = true })
		}
		if matched && h.before != nil {
			if err := h.before(); err != nil {
				return nil, err
			}
		}
		response, err := next.RoundTrip(r)
		if matched && h.after != nil && err == nil {
			if err := h.after(); err != nil {
				_ = response.Body.Close()
				return nil, err
			}
		}
		return response, err
	})
}

// afterDeletion returns a hook that is called right after the deletion of the aggregating role.
func (c *cluster) afterDeletion(act func() error) hook {
	return hook{method: http.MethodDelete, role: c.aggregatingRole(), after: act}
}

func TestWithdrawDeletesRoleThatAggregationCreatesAgain(t *testing.T) {
	t.Parallel()
	for name, content := range map[string]string{"with rules": staleRules, "without rules": ""} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.bundle("one", c.aggregatedChart()...)
			converge(t, c.engine(nil), b)
			c.wantAggregated()
			e := c.intercept(c.afterDeletion(func() error { c.applyStale(content); return nil }))
			withdraw(t, e, bundle.Withdrawal{ID: b.ID})
			c.wantNoClusterRoles()
			c.wantRecords(0)
		})
	}
}

func TestInterruptedWithdrawalDeletesRoleThatAggregationCreatesAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.aggregatedChart()...)
	converge(t, c.engine(nil), b)
	e := c.intercept(c.afterDeletion(func() error { c.applyStale(staleRules); return errCut }))
	if done, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID}); done || err == nil {
		t.Fatalf("interrupted withdrawal: got %t, %v", done, err)
	}
	c.wantRecords(1)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantNoClusterRoles()
	c.wantRecords(0)
}

func TestWithdrawKeepsRoleOfAnotherClient(t *testing.T) {
	t.Parallel()
	for name, create := range map[string]func(*cluster){
		"with rules": func(c *cluster) {
			c.create(clusterRoles, &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
				"metadata": map[string]any{"name": c.aggregatingRole()},
				"rules":    []any{map[string]any{"nonResourceURLs": []any{"/"}, "verbs": []any{"get"}}},
			}})
		},
		"with a label": func(c *cluster) {
			c.applyStale(staleRules)
			c.patchClusterRole(c.aggregatingRole(), `{"metadata":{"labels":{"team":"mine"}}}`)
		},
		"with an aggregation rule": func(c *cluster) {
			c.applyStale(staleRules)
			c.patchClusterRole(c.aggregatingRole(), `{"aggregationRule":{"clusterRoleSelectors":[{"matchLabels":{"a":"b"}}]}}`)
		},
		"with only a label": func(c *cluster) {
			c.applyStale("")
			c.patchClusterRole(c.aggregatingRole(), `{"metadata":{"labels":{"team":"mine"}}}`)
		},
		"without field lists": func(c *cluster) {
			c.applyStale(staleRules)
			c.patchClusterRole(c.aggregatingRole(), `{"metadata":{"managedFields":[{}]}}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.bundle("one", c.aggregatedChart()...)
			converge(t, c.engine(nil), b)
			c.wantAggregated()
			e := c.intercept(c.afterDeletion(func() error { create(c); return nil }))
			withdraw(t, e, bundle.Withdrawal{ID: b.ID})
			if names := c.clusterRoleNames(); len(names) != 1 || names[0] != c.aggregatingRole() {
				t.Errorf("left ClusterRoles: got %v, want the ClusterRole of the other client", names)
			}
			c.wantRecords(0)
			c.deleteAndWait(clusterRoles, c.aggregatingRole())
		})
	}
}

func TestRoleThatAggregationRecreatedIsNotAdopted(t *testing.T) {
	t.Parallel()
	for name, isRejecting := range map[string]bool{"adopt": false, "reject": true} {
		for name, test := range map[string]struct {
			content string
			isLate  bool // the role appears after the run has read the cluster
		}{
			name + ", with rules":             {staleRules, false},
			name + ", without rules":          {"", false},
			name + ", between read and apply": {staleRules, true},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newCluster(t)
				b := c.bundle("one", c.aggregatedChart()...)
				b.Options.RejectUnmanaged = isRejecting
				stale := func() error { c.applyStale(test.content); return nil }
				e := c.engine(nil)
				if test.isLate {
					e = c.intercept(hook{method: http.MethodPatch, role: c.aggregatingRole(), before: stale})
				} else if err := stale(); err != nil {
					t.Fatal(err)
				}
				converge(t, e, b)
				role := c.get(clusterRoles, "", c.aggregatingRole())
				if role == nil || role.GetAnnotations()[kube.AnnotationAdopted] != "" {
					t.Errorf("got %v, want an owned role that is not adopted", role)
				}
				c.wantAggregated()
				withdraw(t, e, bundle.Withdrawal{ID: b.ID})
				c.wantNoClusterRoles()
				c.wantRecords(0)
			})
		}
	}
}

// keepAggregatingRole sets a finalizer on the aggregating role.
func (c *cluster) keepAggregatingRole() {
	c.t.Helper()
	c.patchClusterRole(c.aggregatingRole(), `{"metadata":{"finalizers":["example.com/wait"]}}`)
}

// wantGatheredRolesExist checks that the gathered roles exist while the aggregating role is being deleted, and removes
// the finalizer of the aggregating role.
func (c *cluster) wantGatheredRolesExist() {
	c.t.Helper()
	role := c.get(clusterRoles, "", c.aggregatingRole())
	if role == nil || role.GetDeletionTimestamp() == nil {
		c.t.Fatalf("the aggregating role: got %v, want a deletionTimestamp", role)
	}
	if names := c.clusterRoleNames(); len(names) != 1+len(gatheredRoles) {
		c.t.Errorf("ClusterRoles during the deletion of the aggregating role: got %v, want all", names)
	}
	c.patchClusterRole(c.aggregatingRole(), `{"metadata":{"finalizers":null}}`)
}

func TestWithdrawDeletesAggregatingRoleFirst(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.aggregatedChart()...)
	converge(t, c.engine(nil), b)
	c.keepAggregatingRole()
	if done, err := c.engine(nil).Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID}); done || err != nil {
		t.Fatalf("withdraw with a finalizer: got %t, %v", done, err)
	}
	c.wantGatheredRolesExist()
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantNoClusterRoles()
}

func TestPruneDeletesAggregatingRoleFirst(t *testing.T) {
	t.Parallel()
	for name, proceed := range map[string]bool{"stops at errors": false, "continues on errors": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			converge(t, c.engine(nil), c.bundle("one", c.aggregatedChart()...))
			c.keepAggregatingRole()
			after := c.bundle("one", c.configMap("a", "1"))
			after.Options.ContinueOnError = proceed
			wantConvergeError(t, c.engine(nil), after)
			c.wantGatheredRolesExist()
			converge(t, c.engine(nil), after)
			c.wantNoClusterRoles()
		})
	}
}

func TestPruneDeletesRoleThatAggregationCreatesAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	converge(t, c.engine(nil), c.bundle("one", c.aggregatedChart()...))
	c.wantAggregated()
	after := c.bundle("one", c.configMap("a", "1"))
	e := c.intercept(c.afterDeletion(func() error { c.applyStale(staleRules); return nil }))
	wantChanges(t, converge(t, e, after).Changes, counts{bundle.Created: 1, bundle.Deleted: 3 + len(gatheredRoles)})
	c.wantNoClusterRoles()
}

func TestFailedPruneIsRetriedForRoleThatAggregationCreatesAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	converge(t, c.engine(nil), c.bundle("one", c.aggregatedChart()...))
	c.wantAggregated()
	after := c.bundle("one", c.configMap("a", "1"))
	wantConvergeError(t, c.intercept(
		c.afterDeletion(func() error { c.applyStale(staleRules); return nil }),
		hook{
			method: http.MethodDelete, role: c.aggregatingRole() + ":" + gatheredRoles[0],
			before: func() error { return errors.New("not now") },
		},
	), after)
	converge(t, c.engine(nil), after)
	c.wantNoClusterRoles()
}

func TestDeployAndWithdrawAggregatedChartManyTimes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	chart := c.aggregatedChart()
	for round := range 15 {
		b := c.bundle(fmt.Sprintf("round-%d", round), chart...)
		converge(t, e, b)
		c.wantAggregated()
		if round%2 == 0 {
			converge(t, e, c.bundle(fmt.Sprintf("round-%d", round), c.configMap("a", "1")))
			c.wantNoClusterRoles()
		}
		withdraw(t, e, bundle.Withdrawal{ID: b.ID})
		c.wantNoClusterRoles()
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
	// A controller that has aggregated another role has seen all earlier deletions, so it does not create the deleted
	// roles again.
	other := newCluster(t)
	converge(t, e, other.bundle("other", other.aggregatedChart()...))
	other.wantAggregated()
	c.wantNoClusterRoles()
	withdraw(t, e, bundle.Withdrawal{ID: other.bundle("other").ID})
}
