package rolerequests_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/rolerequests"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

const (
	clusterRole = "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: admin, labels: {team: eng}}\n" +
		"rules: [{apiGroups: [''], resources: [nodes], verbs: [get]}]\n"
	role = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {name: edit, namespace: build}\nrules: [{apiGroups: ['*'], resources: ['*'], verbs: ['*']}]\n"
)

func request() *libv1beta1.RoleRequest {
	return &libv1beta1.RoleRequest{
		ObjectMeta: metav1.ObjectMeta{Name: "eng-access"}, Spec: libv1beta1.RoleRequestSpec{ServiceAccountNamespace: "eng", ServiceAccountName: "devops"},
	}
}

// content returns the content of a ConfigMap with one key per text.
func content(texts ...string) source.Content {
	c := source.Content{Reference: source.Reference{Kind: "ConfigMap", Namespace: "default", Name: "roles"}}
	for i, text := range texts {
		c.Files = append(c.Files, source.File{Name: string(rune('a'+i)) + ".yaml", Data: []byte(text)})
	}
	return c
}

func TestCompile(t *testing.T) {
	t.Parallel()
	manifest, err := rolerequests.Compile(request(), []source.Content{content(clusterRole, "---\n"+role)})
	if err != nil {
		t.Fatal(err)
	}
	objects, err := kube.DecodeManifest(manifest)
	if err != nil {
		t.Fatal(err)
	}
	var refs []string
	for _, object := range objects {
		refs = append(refs, kube.RefOf(object).String())
	}
	want := []string{
		"ClusterRole rbac.authorization.k8s.io rolerequest:eng-access:admin", "ClusterRoleBinding rbac.authorization.k8s.io rolerequest:eng-access:admin",
		"Role rbac.authorization.k8s.io build/rolerequest:eng-access:edit", "RoleBinding rbac.authorization.k8s.io build/rolerequest:eng-access:edit",
	}
	if diff := cmp.Diff(want, refs); diff != "" {
		t.Fatalf("objects (-want +got):\n%s", diff)
	}
	if labels := objects[0].GetLabels(); labels["team"] != "eng" {
		t.Errorf("the labels of the ClusterRole are %v", labels)
	}
	for i, kind := range map[int]string{1: "ClusterRole", 3: "Role"} {
		binding := &rbacv1.RoleBinding{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(objects[i].Object, binding); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: objects[i].GetName()}, binding.RoleRef); diff != "" {
			t.Errorf("role of the %sBinding (-want +got):\n%s", kind, diff)
		}
		if diff := cmp.Diff([]rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "eng", Name: "devops"}}, binding.Subjects); diff != "" {
			t.Errorf("subjects of the %sBinding (-want +got):\n%s", kind, diff)
		}
	}
}

func TestCompileNothing(t *testing.T) {
	t.Parallel()
	manifest, err := rolerequests.Compile(request(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if objects, err := kube.DecodeManifest(manifest); err != nil || len(objects) > 0 {
		t.Errorf("Compile() = %q: %d objects, %v", manifest, len(objects), err)
	}
}

func TestCompileRejects(t *testing.T) {
	t.Parallel()
	template := content(role)
	template.Template = true
	for want, contents := range map[string][]source.Content{
		"ConfigMap default/roles: roleRefs cannot be templates":                                             {template},
		"ConfigMap default/roles, a.yaml: ":                                                                 {content("kind: [")},
		"Secret build/x is neither a Role nor a ClusterRole":                                                {content("apiVersion: v1\nkind: Secret\nmetadata: {name: x, namespace: build}\n")},
		"RoleBinding rbac.authorization.k8s.io build/x is neither":                                          {content(strings.NewReplacer("kind: Role", "kind: RoleBinding", "edit", "x").Replace(role))},
		"Role rbac.authorization.k8s.io edit has no namespace":                                              {content(strings.Replace(role, ", namespace: build", "", 1))},
		"ClusterRole rbac.authorization.k8s.io build/admin has a namespace":                                 {content(strings.Replace(clusterRole, "name: admin", "name: admin, namespace: build", 1))},
		"ConfigMap default/roles, b.yaml: Role rbac.authorization.k8s.io build/edit is in roleRefs twice":   {content(role, role)},
		"ConfigMap default/roles, a.yaml: ClusterRole rbac.authorization.k8s.io admin is in roleRefs twice": slices.Repeat([]source.Content{content(clusterRole)}, 2),
	} {
		_, err := rolerequests.Compile(request(), contents)
		var invalid phase.TerminalError
		if !errors.As(err, &invalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestErrorsHideSecrets has Secrets whose text must not be in an error, which is part of the status of the RoleRequest.
func TestErrorsHideSecrets(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"a password in place of a key": "a: 1\nhunter2: 1\nhunter2: 2\n",
		"an alias":                     "password: *hunter2\n",
		"another object":               "apiVersion: v1\nkind: Secret\nmetadata: {name: hunter2}\n",
		"a Role twice":                 strings.Replace(clusterRole, "admin", "hunter2", 1) + "---\n" + strings.Replace(clusterRole, "admin", "hunter2", 1),
	} {
		secret := content(text)
		secret.Reference.Kind, secret.Sensitive = "Secret", true
		_, err := rolerequests.Compile(request(), []source.Content{secret})
		var invalid phase.TerminalError
		if !errors.As(err, &invalid) || !strings.HasPrefix(err.Error(), "Secret default/roles, a.yaml") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: got %v, want an error that names the key only", name, err)
		}
	}
}
