package engine_test

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// allow lets a ServiceAccount of the test's namespace do this, and nothing else.
func (c *cluster) allow(account string, rules ...rbacv1.PolicyRule) {
	c.t.Helper()
	client := kubernetes.NewForConfigOrDie(c.cfg).RbacV1()
	meta := metav1.ObjectMeta{Namespace: c.ns, Name: account}
	_ = client.Roles(c.ns).Delete(c.t.Context(), account, metav1.DeleteOptions{})
	if _, err := client.Roles(c.ns).Create(c.t.Context(), &rbacv1.Role{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
	_ = client.RoleBindings(c.ns).Delete(c.t.Context(), account, metav1.DeleteOptions{})
	_, err := client.RoleBindings(c.ns).Create(c.t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: c.ns, Name: account}},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: account},
	}, metav1.CreateOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	// The API server needs a moment. All rules of these tests are also for ConfigMaps.
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:               "system:serviceaccount:" + c.ns + ":" + account,
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: c.ns, Resource: "configmaps", Verb: "create"},
	}}
	eventually(c.t, "the rules count", func() bool {
		got, err := kubernetes.NewForConfigOrDie(c.cfg).AuthorizationV1().SubjectAccessReviews().Create(c.t.Context(), review, metav1.CreateOptions{})
		return err == nil && got.Status.Allowed == (len(rules) > 0)
	})
}

func rule(group, resource string, verbs ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: verbs}
}

// as returns b for a ServiceAccount of the test's namespace.
func (c *cluster) as(account string, b bundle.Bundle) bundle.Bundle {
	b.Options.ServiceAccount = c.ns + "/" + account
	return b
}

// identities records which requests of an engine are sent as the engine itself.
type identities struct {
	mu  sync.Mutex // guards own
	own []string
}

func (i *identities) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Header.Get("Impersonate-User") == "" {
			i.mu.Lock()
			i.own = append(i.own, r.Method+" "+r.URL.Path)
			i.mu.Unlock()
		}
		return next.RoundTrip(r)
	})
}

// take returns the requests since the last take that the engine has sent as itself, except those for its records, for
// metadata and discovery.
func (i *identities) take(c *cluster) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	var own []string
	for _, line := range i.own {
		if strings.Contains(line, "/namespaces/"+c.ns) && !strings.HasPrefix(line, "GET ") {
			own = append(own, line)
		}
	}
	i.own = nil
	return own
}

func (c *cluster) impersonating() (*engine.Engine, *identities) {
	c.t.Helper()
	i := &identities{}
	cfg := rest.CopyConfig(c.cfg)
	cfg.Wrap(i.wrap)
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		c.t.Fatal(err)
	}
	return e, i
}

func wantMessage(t *testing.T, report bundle.Report, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(report.Message, part) {
			t.Errorf("message %q, want %q in it", report.Message, part)
		}
	}
}

// TestServiceAccountWritesObjects applies, corrects, prunes and withdraws as a ServiceAccount.
func TestServiceAccountWritesObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.allow("tenant", rule("", "configmaps", "create", "patch", "delete"))
	e, own := c.impersonating()
	converge(t, e, c.as("tenant", c.bundle("p", c.configMap("a", "1"), c.configMap("b", "1"))))
	c.patch(configMaps, "a", `{"data":{"key":"changed"}}`)
	converge(t, e, c.as("tenant", c.bundle("p", c.configMap("a", "1"), c.configMap("b", "1"))))
	if got := c.get(configMaps, c.ns, "a"); got.Object["data"].(map[string]any)["key"] != "1" {
		t.Errorf("got %v, want the drift to be corrected", got.Object["data"])
	}
	converge(t, e, c.as("tenant", c.bundle("p", c.configMap("a", "1"))))
	c.wantAll(configMaps, "a")
	withdraw(t, e, bundle.Withdrawal{ID: c.bundle("p").ID})
	c.wantAll(configMaps)
	if got := own.take(c); len(got) != 0 {
		t.Errorf("sent as the engine: %q", got)
	}
}

// TestServiceAccountWithoutRights fails with the ServiceAccount, the object and the verb. Other bundles are applied.
func TestServiceAccountWithoutRights(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	denied := c.as("nobody", c.bundle("denied", c.configMap("a", "1")))
	report := convergeFails(t, e, denied)
	wantMessage(t, report, `"a" is forbidden`, `User "system:serviceaccount:`+c.ns+`:nobody" cannot patch resource "configmaps"`)
	converge(t, e, c.bundle("other", c.configMap("other", "1")))
	c.wantAll(configMaps, "other")
	withdraw(t, e, bundle.Withdrawal{ID: denied.ID})
}

// TestChangedServiceAccount applies unchanged objects again as another ServiceAccount, until that succeeds.
func TestChangedServiceAccount(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.bundle("p", c.configMap("a", "1"))
	converge(t, e, b)
	uid := c.get(configMaps, c.ns, "a").GetUID()
	for range 2 {
		wantMessage(t, convergeFails(t, c.engine(nil), c.as("tenant", b)), c.ns+":tenant")
	}
	c.allow("tenant", rule("", "configmaps", "create", "patch"))
	converge(t, c.engine(nil), c.as("tenant", b))
	if got := c.get(configMaps, c.ns, "a").GetUID(); got != uid {
		t.Errorf("got UID %s, want the same object", got)
	}
	converge(t, c.engine(nil), b)
}

// TestWithdrawalAfterServiceAccountLostItsRights deletes the objects that the ServiceAccount has created, and no
// others.
func TestWithdrawalAfterServiceAccountLostItsRights(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("theirs", "1"))
	c.allow("tenant", rule("", "configmaps", "create", "patch"))
	e := c.engine(nil)
	b := c.as("tenant", c.bundle("p", c.configMap("created", "1"), c.configMap("theirs", "2")))
	converge(t, e, b)
	c.allow("tenant")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAll(configMaps, "theirs")
}

// TestForgedOwnershipDeletesNothing: a ServiceAccount that may change an object, and not delete it, marks the object as
// one of its bundle. Without a record the engine finds its objects by their ownership annotations.
func TestForgedOwnershipDeletesNothing(t *testing.T) {
	t.Parallel()
	for name, isDelivered := range map[string]bool{"delivered": true, "withdrawn without a delivery": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.allow("tenant", rule("", "configmaps", "create", "patch"))
			b := c.as("tenant", c.bundle("p", c.configMap("victim", "1"), c.configMap("other", "1")))
			// The tenant copies the ownership annotations from an object that was applied for his bundle before.
			converge(t, c.engine(nil), b)
			marked := c.get(configMaps, c.ns, "victim")
			c.loseRecords("head")
			c.delete(configMaps, "victim")
			forged := c.configMap("victim", "1")
			forged.SetLabels(map[string]string{kube.LabelReason: b.ID.Feature})
			forged.SetAnnotations(marked.GetAnnotations())
			c.create(configMaps, c.configMap("victim", "1"))
			raw, err := forged.MarshalJSON()
			if err != nil {
				t.Fatal(err)
			}
			force := true
			_, err = c.objects.Resource(configMaps).Namespace(c.ns).Patch(t.Context(), "victim", types.ApplyPatchType, raw,
				metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force})
			if err != nil {
				t.Fatal(err)
			}
			e := c.engine(nil)
			if isDelivered {
				converge(t, e, b)
				wantMessage(t, convergeFails(t, e, c.as("tenant", c.bundle("p", c.configMap("other", "1")))), `cannot delete resource "configmaps"`)
			}
			_, err = e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID, ServiceAccount: b.Options.ServiceAccount})
			if err == nil || !strings.Contains(err.Error(), `cannot delete resource "configmaps"`) {
				t.Errorf("got error %v, want that the ServiceAccount cannot delete it", err)
			}
			if c.get(configMaps, c.ns, "victim") == nil {
				t.Error("the object was deleted")
			}
		})
	}
}

// TestServiceAccountDeploysARelease runs hooks, reads and writes release records, and uninstalls as a ServiceAccount.
func TestServiceAccountDeploysARelease(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e, own := c.impersonating()
	b := c.as("tenant", c.chart(bundle.ReleaseOptions{Wait: true}, c.configMap("a", "1"),
		asHook(c.job("before", true), "pre-install,pre-upgrade", 0, ""), asHook(c.job("after", true), "post-delete", 0, "")))
	wantMessage(t, settle(t, e, b), c.ns+`:tenant" cannot list resource "secrets"`)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.allow("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
	wantMessage(t, settle(t, c.engine(nil), b), c.ns+`:tenant" cannot`, `resource "jobs"`)
	c.wantAll(jobs)
	c.allow("tenant", rule("", "secrets", all...), rule("", "configmaps", all...), rule("batch", "jobs", all...))
	own.take(c)
	eventually(t, "deployed", func() bool {
		report, err := e.Converge(t.Context(), b)
		return err == nil && report.State == bundle.StateApplied
	})
	c.wantAll(configMaps, "a")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAll(configMaps)
	if got := c.history(); len(got) != 0 {
		t.Errorf("history: got %q, want none", got)
	}
	if got := own.take(c); len(got) != 0 {
		t.Errorf("sent as the engine: %q", got)
	}
}

// TestForgedHookIsNotDeleted: a ServiceAccount that may change an object, and not delete it, marks the object as that
// of a hook which is about to run. The name of the run is on the Job of the hook before.
func TestForgedHookIsNotDeleted(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.allow("tenant", rule("", "secrets", all...), rule("batch", "jobs", all...), rule("", "configmaps", "get", "create", "patch"))
	c.create(configMaps, c.configMap("victim", "1"))
	cfg := rest.CopyConfig(c.cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			response, err := next.RoundTrip(r)
			if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/jobs") {
				run := c.get(jobs, c.ns, "first").GetAnnotations()["towline.dev/hook-run"]
				c.patch(configMaps, "victim", `{"metadata":{"annotations":{"towline.dev/hook-run":"`+run+`"}}}`)
			}
			return response, err
		})
	})
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		t.Fatal(err)
	}
	b := c.as("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1"),
		asHook(c.job("first", true), "pre-install", 0, ""), asHook(c.configMap("victim", "2"), "pre-install", 1, "hook-succeeded")))
	var report bundle.Report
	eventually(t, "the hook is to be deleted", func() bool {
		report, err = e.Converge(t.Context(), b)
		return err != nil && strings.Contains(err.Error(), "delete hook") || report.State == bundle.StateApplied || report.State == bundle.StateFailed
	})
	if err != nil {
		report.Message = err.Error()
	}
	wantMessage(t, report, `cannot delete resource "configmaps"`)
	if c.get(configMaps, c.ns, "victim") == nil {
		t.Error("the object was deleted")
	}
}

// TestServiceAccountHasNoGroupsOfTheKubeconfig deploys with a kubeconfig that impersonates an administrator itself.
func TestServiceAccountHasNoGroupsOfTheKubeconfig(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	cfg := rest.CopyConfig(c.cfg)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: "admin", Groups: []string{"system:masters"}, Extra: map[string][]string{"reason": {"test"}}}
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		t.Fatal(err)
	}
	report := convergeFails(t, e, c.as("nobody", c.bundle("denied", c.configMap("a", "1"))))
	wantMessage(t, report, `User "system:serviceaccount:`+c.ns+`:nobody" cannot patch resource "configmaps"`)
	c.wantAll(configMaps)
}

// TestUninstallAfterServiceAccountLostItsRights uninstalls a release without hooks.
func TestUninstallAfterServiceAccountLostItsRights(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.allow("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
	e := c.engine(nil)
	b := c.as("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1")))
	deploy(t, e, b)
	c.allow("tenant")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAll(configMaps)
	if got := c.history(); len(got) != 0 {
		t.Errorf("history: got %q, want none", got)
	}
}

// TestHooksOfADroppedReleaseHaveNoNewRights takes over the bundle of an account without the account. The hooks of its
// release run as that account all the same.
func TestHooksOfADroppedReleaseHaveNoNewRights(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(e *engine.Engine, b bundle.Bundle) error{
		"dropped": func(e *engine.Engine, b bundle.Bundle) error {
			b.Options.ServiceAccount, b.Items = "", nil
			_, err := e.Converge(t.Context(), b)
			return err
		},
		"dropped and withdrawn": func(e *engine.Engine, b bundle.Bundle) error {
			b.Options.ServiceAccount, b.Items = "", nil
			_, _ = e.Converge(t.Context(), b)
			_, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			all := []string{"get", "list", "create", "update", "patch", "delete"}
			c.allow("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
			e := c.engine(nil)
			b := c.as("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1"), asHook(c.job("escape", true), "pre-delete", 0, "")))
			deploy(t, e, b)
			want := `User "system:serviceaccount:` + c.ns + `:tenant" cannot`
			if err := end(e, b); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got error %v, want %s", err, want)
			}
			c.wantAll(jobs)
		})
	}
}
