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

// grantOnly creates a ServiceAccount in the test's namespace with only these permissions.
func (c *cluster) grantOnly(account string, rules ...rbacv1.PolicyRule) {
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
	// The API server needs some time to enforce the rules. All rules of these tests include ConfigMaps.
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

// withServiceAccount returns b with a ServiceAccount of the test's namespace.
func (c *cluster) withServiceAccount(account string, b bundle.Bundle) bundle.Bundle {
	b.Options.ServiceAccount = c.ns + "/" + account
	return b
}

// identities records the requests that an engine sends with its own identity.
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

// take returns the requests since the last call that the engine has sent with its own identity, without the requests
// for its records, for metadata and for discovery.
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
	c.grantOnly("tenant", rule("", "configmaps", "create", "patch", "delete"))
	e, own := c.impersonating()
	converge(t, e, c.withServiceAccount("tenant", c.bundle("p", c.configMap("a", "1"), c.configMap("b", "1"))))
	c.patch(configMaps, "a", `{"data":{"key":"changed"}}`)
	converge(t, e, c.withServiceAccount("tenant", c.bundle("p", c.configMap("a", "1"), c.configMap("b", "1"))))
	if got := c.get(configMaps, c.ns, "a"); got.Object["data"].(map[string]any)["key"] != "1" {
		t.Errorf("got %v, want corrected data", got.Object["data"])
	}
	converge(t, e, c.withServiceAccount("tenant", c.bundle("p", c.configMap("a", "1"))))
	c.wantAllNames(configMaps, "a")
	withdraw(t, e, bundle.Withdrawal{ID: c.bundle("p").ID})
	c.wantAllNames(configMaps)
	if got := own.take(c); len(got) != 0 {
		t.Errorf("sent as the engine: %q", got)
	}
}

// TestServiceAccountWithoutPermissions checks that the error names the ServiceAccount, the object and the verb, and
// that other bundles are applied.
func TestServiceAccountWithoutPermissions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	denied := c.withServiceAccount("nobody", c.bundle("denied", c.configMap("a", "1")))
	report := wantConvergeError(t, e, denied)
	wantMessage(t, report, `"a" is forbidden`, `User "system:serviceaccount:`+c.ns+`:nobody" cannot patch resource "configmaps"`)
	converge(t, e, c.bundle("other", c.configMap("other", "1")))
	c.wantAllNames(configMaps, "other")
	withdraw(t, e, bundle.Withdrawal{ID: denied.ID})
}

// TestChangedServiceAccount applies unchanged objects again as another ServiceAccount, until the apply succeeds.
func TestChangedServiceAccount(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.bundle("p", c.configMap("a", "1"))
	converge(t, e, b)
	uid := c.get(configMaps, c.ns, "a").GetUID()
	for range 2 {
		wantMessage(t, wantConvergeError(t, c.engine(nil), c.withServiceAccount("tenant", b)), c.ns+":tenant")
	}
	c.grantOnly("tenant", rule("", "configmaps", "create", "patch"))
	converge(t, c.engine(nil), c.withServiceAccount("tenant", b))
	if got := c.get(configMaps, c.ns, "a").GetUID(); got != uid {
		t.Errorf("got UID %s, want the same object", got)
	}
	converge(t, c.engine(nil), b)
}

// TestWithdrawalAfterServiceAccountLostItsPermissions checks that only the objects that the ServiceAccount has created
// are deleted.
func TestWithdrawalAfterServiceAccountLostItsPermissions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("theirs", "1"))
	c.grantOnly("tenant", rule("", "configmaps", "create", "patch"))
	e := c.engine(nil)
	b := c.withServiceAccount("tenant", c.bundle("p", c.configMap("created", "1"), c.configMap("theirs", "2")))
	converge(t, e, b)
	c.grantOnly("tenant")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(configMaps, "theirs")
}

// TestObjectWithForgedOwnershipIsNotDeleted sets the ownership annotations of a bundle on an object that its
// ServiceAccount may change but not delete. Without a record the engine finds its objects by these annotations.
func TestObjectWithForgedOwnershipIsNotDeleted(t *testing.T) {
	t.Parallel()
	for name, isDelivered := range map[string]bool{"delivered": true, "withdrawn without a delivery": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.grantOnly("tenant", rule("", "configmaps", "create", "patch"))
			b := c.withServiceAccount("tenant", c.bundle("p", c.configMap("victim", "1"), c.configMap("other", "1")))
			// The tenant copies the ownership annotations of an applied object of the bundle.
			converge(t, c.engine(nil), b)
			marked := c.get(configMaps, c.ns, "victim")
			c.deleteRecords("head")
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
				wantMessage(t, wantConvergeError(t, e, c.withServiceAccount("tenant", c.bundle("p", c.configMap("other", "1")))), `cannot delete resource "configmaps"`)
			}
			_, err = e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID, ServiceAccount: b.Options.ServiceAccount})
			if err == nil || !strings.Contains(err.Error(), `cannot delete resource "configmaps"`) {
				t.Errorf("got error %v, want a denial of the deletion", err)
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
	b := c.withServiceAccount("tenant", c.chart(bundle.ReleaseOptions{Wait: true}, c.configMap("a", "1"),
		asHook(c.job("before", true), "pre-install,pre-upgrade", 0, ""), asHook(c.job("after", true), "post-delete", 0, "")))
	wantMessage(t, convergeUntilDone(t, e, b), c.ns+`:tenant" cannot list resource "secrets"`)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.grantOnly("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
	wantMessage(t, convergeUntilDone(t, c.engine(nil), b), c.ns+`:tenant" cannot`, `resource "jobs"`)
	c.wantAllNames(jobs)
	c.grantOnly("tenant", rule("", "secrets", all...), rule("", "configmaps", all...), rule("batch", "jobs", all...))
	own.take(c)
	eventually(t, "deployed", func() bool {
		report, err := e.Converge(t.Context(), b)
		return err == nil && report.State == bundle.StateApplied
	})
	c.wantAllNames(configMaps, "a")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(configMaps)
	if got := c.listHistory(); len(got) != 0 {
		t.Errorf("history: got %q, want none", got)
	}
	if got := own.take(c); len(got) != 0 {
		t.Errorf("sent as the engine: %q", got)
	}
}

// TestForgedHookIsNotDeleted sets the annotations of the next hook on an object that the ServiceAccount may change but
// not delete. The Job of the previous hook has the name of the run.
func TestForgedHookIsNotDeleted(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.grantOnly("tenant", rule("", "secrets", all...), rule("batch", "jobs", all...), rule("", "configmaps", "get", "create", "patch"))
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
	b := c.withServiceAccount("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1"),
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
	report := wantConvergeError(t, e, c.withServiceAccount("nobody", c.bundle("denied", c.configMap("a", "1"))))
	wantMessage(t, report, `User "system:serviceaccount:`+c.ns+`:nobody" cannot patch resource "configmaps"`)
	c.wantAllNames(configMaps)
}

// TestUninstallAfterServiceAccountLostItsPermissions uninstalls a release without hooks.
func TestUninstallAfterServiceAccountLostItsPermissions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	all := []string{"get", "list", "create", "update", "patch", "delete"}
	c.grantOnly("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
	e := c.engine(nil)
	b := c.withServiceAccount("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1")))
	deploy(t, e, b)
	c.grantOnly("tenant")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantAllNames(configMaps)
	if got := c.listHistory(); len(got) != 0 {
		t.Errorf("history: got %q, want none", got)
	}
}

// TestHooksOfADroppedReleaseGetNoNewPermissions delivers the bundle of an account without the account. The hooks of the
// dropped release still run as the account.
func TestHooksOfADroppedReleaseGetNoNewPermissions(t *testing.T) {
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
			c.grantOnly("tenant", rule("", "secrets", all...), rule("", "configmaps", all...))
			e := c.engine(nil)
			b := c.withServiceAccount("tenant", c.chart(bundle.ReleaseOptions{}, c.configMap("a", "1"), asHook(c.job("escape", true), "pre-delete", 0, "")))
			deploy(t, e, b)
			want := `User "system:serviceaccount:` + c.ns + `:tenant" cannot`
			if err := end(e, b); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got error %v, want %s", err, want)
			}
			c.wantAllNames(jobs)
		})
	}
}
