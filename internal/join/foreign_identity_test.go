package join

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/kube"
)

// madeBySveltos is the identity of cluster b-c in namespace a as the sveltosctl of Sveltos makes it, on a hub without
// anything else.
func madeBySveltos(t *testing.T) *foreignIdentity {
	t.Helper()
	raw, err := os.ReadFile("testdata/sveltos-registration.yaml")
	if err != nil {
		t.Fatal(err)
	}
	objects, err := kube.DecodeManifest([]byte(strings.NewReplacer("NAMESPACE", "a", "CLUSTER", "b-c").Replace(string(raw))))
	if err != nil {
		t.Fatal(err)
	}
	i := newForeignIdentity(Request{Namespace: "a", Name: "b-c"})
	kinds := map[string]any{
		"ServiceAccount": i.account, "Secret": i.token, "Role": i.role, "ClusterRole": i.clusterRole,
		"RoleBinding": i.binding, "ClusterRoleBinding": i.clusterBinding,
	}
	for _, obj := range objects {
		if typed := kinds[obj.GetKind()]; typed != nil {
			obj.SetUID(types.UID(obj.GetKind()))
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, typed); err != nil {
				t.Fatal(err)
			}
		}
	}
	return i
}

func TestForeignIdentityDecides(t *testing.T) {
	t.Parallel()
	agent := rbacv1.Subject{Kind: "ServiceAccount", Namespace: "a", Name: "b-c"}
	other := rbacv1.Subject{Kind: "ServiceAccount", Namespace: "a-b", Name: "c"}
	people := rbacv1.Subject{Kind: "Group", Name: "people"}
	roleBinding := func(role string, subject rbacv1.Subject) grant {
		return grantOf(&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "x", UID: "x"},
			RoleRef:    rbacv1.RoleRef{Kind: "Role", Name: role}, Subjects: []rbacv1.Subject{subject},
		})
	}
	all := map[string]string{"ServiceAccount": "", "Secret": "", "Role": "", "ClusterRole": "", "RoleBinding": "", "ClusterRoleBinding": ""}
	// but is everything that goes when nothing else uses it, with other reasons; "-" takes one out.
	but := func(pairs ...string) map[string]string {
		want := map[string]string{}
		for kind, reason := range all {
			want[kind] = reason
		}
		for n := 0; n < len(pairs); n += 2 {
			want[pairs[n]] = pairs[n+1]
			if pairs[n+1] == "-" {
				delete(want, pairs[n])
			}
		}
		return want
	}
	const stays = "it is for a token of ServiceAccount a/b-c, which stays"
	const notAgents = "its rules are not those of an agent"
	ci := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list"}}}
	for name, test := range map[string]struct {
		change func(*foreignIdentity)
		want   map[string]string
	}{
		"as Sveltos makes it": {func(*foreignIdentity) {}, all},
		"of our own":          {ours, map[string]string{}},
		"an own ServiceAccount with a foreign rest": {
			func(i *foreignIdentity) { i.account.Labels = map[string]string{registrationLabel: "b-c"} }, but("ServiceAccount", "-"),
		},
		"a RoleBinding with other subjects": {
			func(i *foreignIdentity) { i.binding.Subjects = []rbacv1.Subject{agent, people} },
			but("RoleBinding", "it has other subjects, too", "Role", "RoleBinding a/b-c grants it"),
		},
		"a RoleBinding of another Role": {
			func(i *foreignIdentity) { i.binding.RoleRef.Name = "edit" },
			but("RoleBinding", "it does not grant Role b-c, as an agent has it, to ServiceAccount a/b-c",
				"ServiceAccount", "RoleBinding a/b-c names it", "Secret", stays),
		},
		"a RoleBinding for others": {
			func(i *foreignIdentity) { i.binding.Subjects = []rbacv1.Subject{people} },
			but("RoleBinding", "it does not grant Role b-c, as an agent has it, to ServiceAccount a/b-c", "Role", "RoleBinding a/b-c grants it"),
		},
		"an application of the same name": {
			func(i *foreignIdentity) { i.role.Rules = ci },
			but("Role", notAgents, "RoleBinding", "it does not grant Role b-c, as an agent has it, to ServiceAccount a/b-c",
				"ServiceAccount", "RoleBinding a/b-c names it", "Secret", stays),
		},
		"a Role that another binding grants": {
			func(i *foreignIdentity) { i.grants = append(i.grants, roleBinding("b-c", people)) }, but("Role", "RoleBinding a/x grants it"),
		},
		"a ServiceAccount with other rights": {
			func(i *foreignIdentity) { i.grants = append(i.grants, roleBinding("edit", agent)) },
			but("ServiceAccount", "RoleBinding a/x names it", "Secret", stays),
		},
		"a ServiceAccount that a user's name stands for": {
			func(i *foreignIdentity) {
				i.grants = append(i.grants, roleBinding("edit", rbacv1.Subject{Kind: "User", Name: "system:serviceaccount:a:b-c"}))
			},
			but("ServiceAccount", "RoleBinding a/x names it", "Secret", stays),
		},
		"a ServiceAccount that runs something": {
			func(i *foreignIdentity) { i.users = []string{"Pod a/p"} }, but("ServiceAccount", "Pod a/p uses it", "Secret", stays),
		},
		"a ServiceAccount of an operator": {
			func(i *foreignIdentity) {
				i.account.OwnerReferences = []metav1.OwnerReference{{Kind: "Robot", Name: "r"}}
			},
			but("ServiceAccount", "it belongs to Robot r", "Secret", stays),
		},
		"a Secret of another type": {
			func(i *foreignIdentity) { i.token.Type = corev1.SecretTypeOpaque }, but("Secret", "it is not for a token of ServiceAccount a/b-c"),
		},
		"a token of another ServiceAccount": {
			func(i *foreignIdentity) { i.token.Annotations = map[string]string{corev1.ServiceAccountNameKey: "z"} },
			but("Secret", "it is not for a token of ServiceAccount a/b-c"),
		},
		"a ClusterRole that another binding grants": {
			func(i *foreignIdentity) {
				g := roleBinding("a-b-c", people)
				g.ref.Kind = "ClusterRole"
				i.grants = append(i.grants, g)
			},
			but("ClusterRole", "RoleBinding a/x grants it"),
		},
		"cluster-wide objects of cluster c in namespace a-b": {
			func(i *foreignIdentity) { i.clusterBinding.Subjects = []rbacv1.Subject{other} }, but("ClusterRole", "-", "ClusterRoleBinding", "-"),
		},
		"cluster-wide objects of two clusters": {
			func(i *foreignIdentity) { i.clusterBinding.Subjects = []rbacv1.Subject{agent, other} },
			but("ClusterRole", "ClusterRoleBinding a-b-c grants it", "ClusterRoleBinding", "it has other subjects, too"),
		},
		"a ClusterRole without its binding": {
			func(i *foreignIdentity) { *i.clusterBinding = rbacv1.ClusterRoleBinding{} },
			but("ClusterRole", "no ClusterRoleBinding says for which agent it is", "ClusterRoleBinding", "-"),
		},
		"somebody's ClusterRole": {
			func(i *foreignIdentity) { *i.clusterBinding, i.clusterRole.Rules = rbacv1.ClusterRoleBinding{}, ci },
			but("ClusterRole", "-", "ClusterRoleBinding", "-"),
		},
		"a ServiceAccount alone": {
			func(i *foreignIdentity) {
				j := newForeignIdentity(i.request)
				j.account = i.account
				*i = *j
			},
			map[string]string{"ServiceAccount": "nothing shows that it is the agent's"},
		},
		"a ServiceAccount and its token, after a deregistration that Sveltos did not finish": {
			func(i *foreignIdentity) {
				j := newForeignIdentity(i.request)
				j.account, j.token = i.account, i.token
				*i = *j
			},
			map[string]string{"ServiceAccount": "", "Secret": ""},
		},
		"not known who uses it": {
			func(i *foreignIdentity) {
				*i = foreignIdentity{request: i.request, account: i.account, token: &corev1.Secret{}, role: &rbacv1.Role{}, clusterRole: &rbacv1.ClusterRole{},
					binding: &rbacv1.RoleBinding{}, clusterBinding: &rbacv1.ClusterRoleBinding{}, unknown: "forbidden"}
			},
			map[string]string{"ServiceAccount": "whether something else uses it is not known: forbidden"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := madeBySveltos(t)
			test.change(i)
			i.grants = append(i.grants, grantOf(i.binding), clusterGrantOf(i.clusterBinding))
			if diff := cmp.Diff(test.want, reasons(t, i)); diff != "" {
				t.Errorf("reasons to stay (-want +got):\n%s", diff)
			}
		})
	}
}

// ours labels the identity as Towline does.
func ours(i *foreignIdentity) {
	for _, obj := range i.objects() {
		obj.SetLabels(map[string]string{registrationLabel: i.request.Name})
	}
}

// reasons returns why the objects of each kind stay that are decided on.
func reasons(t *testing.T, i *foreignIdentity) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, d := range i.decide() {
		got[string(d.obj.GetUID())] = d.reason
	}
	return got
}

func TestForeignIdentityIsRecognizedAfterEveryDeletion(t *testing.T) {
	t.Parallel()
	for deleted := range madeBySveltos(t).objects() {
		i := madeBySveltos(t)
		whole := i.decide()
		for _, d := range whole[:deleted] {
			d.obj.SetUID("")
		}
		i.grants = []grant{grantOf(i.binding), clusterGrantOf(i.clusterBinding)}
		for _, d := range i.decide() {
			if d.reason != "" {
				t.Errorf("after %d deletions %T stays: %s", deleted, d.obj, d.reason)
			}
		}
		if got, want := len(i.decide()), len(whole)-deleted; got != want {
			t.Errorf("after %d deletions: %d objects go, want %d", deleted, got, want)
		}
	}
}

func TestDefaultServiceAccountIsNobodys(t *testing.T) {
	t.Parallel()
	i := newForeignIdentity(Request{Namespace: "a", Name: "default"})
	i.account.UID, i.token.UID = "ServiceAccount", "Secret"
	i.token.Type, i.token.Annotations = corev1.SecretTypeServiceAccountToken, map[string]string{corev1.ServiceAccountNameKey: "default"}
	want := map[string]string{"Secret": "it is for a token of ServiceAccount a/default, which stays"}
	if diff := cmp.Diff(want, reasons(t, i)); diff != "" {
		t.Errorf("reasons to stay (-want +got):\n%s", diff)
	}
}
