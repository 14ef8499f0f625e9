package attacks

import (
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// installRoles creates the ClusterRoles for users of config/hub.yaml.
func (w *world) installRoles() {
	w.Helper()
	raw, err := os.ReadFile("../../config/hub.yaml")
	w.noError(err)
	count := 0
	for doc := range strings.SplitSeq(string(raw), "\n---\n") {
		role := &rbacv1.ClusterRole{}
		if yaml.Unmarshal([]byte(doc), role) != nil || role.Kind != "ClusterRole" {
			continue
		}
		switch role.Name {
		case "towline-view", "towline-edit", "towline-admin":
			w.noError(client.IgnoreAlreadyExists(w.Create(w.Context(), role)))
			count++
		}
	}
	if count != 3 {
		w.Fatalf("config/hub.yaml has %d of the roles", count)
	}
}

// TestRolesOfUsers: users with a role of Towline, or with the role of Kubernetes to which it is added, try requests
// that the role does not allow. The roles are bound in the whole cluster.
func TestRolesOfUsers(t *testing.T) {
	w := newWorld(t)
	w.installRoles()
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: w.ns, Name: name} }
	attempts := map[string]func(client.Client) error{
		"read profiles": func(c client.Client) error {
			return c.List(w.Context(), &configv1beta1.ProfileList{}, client.InNamespace(w.ns))
		},
		"read content": func(c client.Client) error {
			return c.List(w.Context(), &libv1beta1.ConfigurationBundleList{}, client.InNamespace(w.ns))
		},
		"read groups": func(c client.Client) error {
			return c.List(w.Context(), &libv1beta1.ConfigurationGroupList{}, client.InNamespace(w.ns))
		},
		"read secrets": func(c client.Client) error {
			return c.List(w.Context(), &corev1.SecretList{}, client.InNamespace(w.ns))
		},
	}
	for what, obj := range map[string]client.Object{
		"write a profile":         &configv1beta1.Profile{ObjectMeta: meta("x")},
		"write a cluster profile": &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: "x"}},
		"write a role request":    &libv1beta1.RoleRequest{ObjectMeta: metav1.ObjectMeta{Name: "x"}},
		"write a summary":         &configv1beta1.ClusterSummary{ObjectMeta: meta("x")},
		"write a cluster":         &libv1beta1.SveltosCluster{ObjectMeta: meta("x")},
		"write content":           &libv1beta1.ConfigurationBundle{ObjectMeta: meta("x")},
		"write a group":           &libv1beta1.ConfigurationGroup{ObjectMeta: meta("x")},
	} {
		attempts[what] = func(c client.Client) error {
			// A change is refused before the object is validated.
			return client.IgnoreNotFound(c.Patch(w.Context(), obj.DeepCopyObject().(client.Object), client.RawPatch("application/merge-patch+json", []byte(`{}`)), client.DryRunAll))
		}
	}
	const profiles, own = "read profiles", "write a profile"
	for name, allowed := range map[string][]string{
		"towline-view": {profiles}, "towline-edit": {profiles, own}, "towline-admin": {profiles, own, "read content", "read groups", "read secrets"},
		"view": {profiles}, "edit": {profiles, own, "read secrets"}, "admin": {profiles, own, "read content", "read groups", "read secrets"},
	} {
		account := &corev1.ServiceAccount{ObjectMeta: meta(name)}
		w.noError(w.Create(w.Context(), account))
		w.noError(w.Create(w.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.ns, Name: name}},
		}))
		user := w.accountClient(account)
		for _, what := range allowed {
			w.eventually(name+" may "+what, func() error { return attempts[what](user) })
		}
		for what, try := range attempts {
			if err := try(user); strings.Contains(strings.Join(allowed, ","), what) != (err == nil) || err != nil && !apierrors.IsForbidden(err) {
				t.Errorf("%s: %s: got %v", name, what, err)
			}
		}
	}
}
