package hub_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const roleManifest = "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {name: edit, namespace: build}\n" +
	"rules: [{apiGroups: [''], resources: [configmaps], verbs: [create]}]\n"

const clusterRoleManifest = "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole\nmetadata: {name: read}\n" +
	"rules: [{apiGroups: [''], resources: [nodes], verbs: [get]}]\n"

// createRoleRequest creates a RoleRequest for the members of the test with the label env=prod and the ConfigMap
// "roles".
func (w *world) createRoleRequest(name string) *libv1beta1.RoleRequest {
	w.Helper()
	request := &libv1beta1.RoleRequest{
		ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + name},
		Spec: libv1beta1.RoleRequestSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: w.prodLabels()}, ServiceAccountNamespace: "tenants", ServiceAccountName: name,
			RoleRefs: []libv1beta1.RoleRef{{Kind: "ConfigMap", Namespace: w.ns, Name: "roles"}},
		},
	}
	w.create(request)
	w.Cleanup(func() {
		if err := w.Delete(context.WithoutCancel(w.Context()), request); client.IgnoreNotFound(err) != nil {
			w.Error(err)
		}
	})
	return request
}

// rolesOf returns the references to the Roles of a RoleRequest and their bindings, in the format of refs.
func rolesOf(request *libv1beta1.RoleRequest, roles ...string) []string {
	var refs []string
	for _, role := range roles {
		kind, name, _ := strings.Cut(role, " ")
		namespace := map[string]string{"Role": "build/"}[kind]
		for _, kind := range []string{kind, kind + "Binding"} {
			refs = append(refs, fmt.Sprintf("%s rbac.authorization.k8s.io %srolerequest:%s:%s", kind, namespace, request.Name, name))
		}
	}
	return refs
}

func (w *world) wantRoles(what, member string, want []string) {
	w.Helper()
	w.eventually(what, func() error { return checkEqual(want, w.refs(member, string(libv1beta1.FeatureResources))) })
}

// wantRequestFailure waits until the RoleRequest has the failure, and returns its matching clusters.
func (w *world) wantRequestFailure(request *libv1beta1.RoleRequest, text string) (clusters []string) {
	w.Helper()
	w.eventually("failure of "+request.Name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(request), request); err != nil {
			return err
		}
		failure := ""
		if message := request.Status.FailureMessage; message != nil {
			failure = *message
		}
		if (failure == "") != (text == "") || !strings.Contains(failure, text) {
			return fmt.Errorf("the failure is %q, want %q", failure, text)
		}
		return nil
	})
	for _, ref := range request.Status.MatchingClusterRefs {
		clusters = append(clusters, ref.Name)
	}
	return clusters
}

// checkDeleted returns an error unless obj does not exist.
func (w *world) checkDeleted(obj client.Object) error {
	err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj)
	if err == nil {
		return fmt.Errorf("%T %s exists", obj, obj.GetName())
	}
	return client.IgnoreNotFound(err)
}

func TestRoleRequestIsDeployedAndWithdrawn(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	two := w.createReadyMember("two", w.prodLabels())
	w.createReadyMember("other", map[string]string{"env": "test", "test": w.ns})
	eng := w.createRoleRequest("eng")
	w.wantRequestFailure(eng, "ConfigMap "+w.ns+"/roles does not exist")
	roles := w.createConfigMap("roles", roleManifest+clusterRoleManifest)
	both := []string{"Role edit", "ClusterRole read"}
	for _, member := range []string{"one", "two"} {
		w.wantRoles("Roles on "+member, member, rolesOf(eng, both...))
	}
	w.eventually("matching clusters", func() error { return checkEqual([]string{"one", "two"}, w.wantRequestFailure(eng, "")) })
	w.wantRoles("no Roles elsewhere", "other", nil)

	t.Log("a second RoleRequest with the same Roles is no conflict")
	hr := w.createRoleRequest("hr")
	w.wantRoles("Roles of both", "one", append(rolesOf(eng, both...), rolesOf(hr, both...)...))
	w.must(w.Delete(t.Context(), hr))
	w.wantRoles("Roles of one", "one", rolesOf(eng, both...))

	t.Log("a change of the content")
	update(w, roles, func(cm *corev1.ConfigMap) { cm.Data["content"] = roleManifest })
	w.wantRoles("one Role", "one", rolesOf(eng, "Role edit"))
	t.Log("an error changes nothing")
	update(w, roles, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest("web") })
	w.wantRequestFailure(eng, "ConfigMap default/web is neither a Role nor a ClusterRole")
	w.wantRoles("as before", "one", rolesOf(eng, "Role edit"))

	t.Log("a cluster stops matching")
	update(w, two, func(c *libv1beta1.SveltosCluster) { c.Labels["env"] = "test" })
	w.wantRoles("withdrawn", "two", nil)

	t.Log("a RoleRequest exists until its Roles are withdrawn")
	w.set(func(b *fakeTransport) {
		b.refuse = func(bundle.Withdrawal) (bool, error) { return false, errors.New("refused") }
	})
	w.must(w.Delete(t.Context(), eng))
	w.wantRequestFailure(eng, "the Roles are being withdrawn")
	w.set(func(b *fakeTransport) { b.refuse = nil })
	w.eventually("nothing is left", func() error {
		name := "role-request-" + eng.Name
		for _, obj := range []client.Object{
			eng, &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: name}},
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: name}},
		} {
			if err := w.checkDeleted(obj); err != nil {
				return err
			}
		}
		return nil
	})
	w.wantRoles("withdrawn", "one", nil)
}

// TestRoleRequestCorrectsGeneratedObjects changes and deletes the generated objects. A ClusterProfile of the same name
// that the hub has not generated stays.
func TestRoleRequestCorrectsGeneratedObjects(t *testing.T) {
	w := newWorld(t)
	w.createReadyMember("one", w.prodLabels())
	w.createConfigMap("roles", roleManifest)
	request := w.createRoleRequest("eng")
	want := rolesOf(request, "Role edit")
	w.wantRoles("Roles", "one", want)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "role-request-" + request.Name}}
	update(w, secret, func(s *corev1.Secret) { s.Data["roles.yaml"] = []byte(manifest("web")) })
	w.eventually("the Secret is corrected", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(secret), secret); err != nil {
			return err
		}
		if !strings.Contains(string(secret.Data["roles.yaml"]), "rolerequest:"+request.Name+":edit") {
			return errors.New("other content")
		}
		return nil
	})
	w.must(w.Delete(t.Context(), secret))
	profile := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: secret.Name}}
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile))
	if profile.Generation != 1 {
		t.Errorf("the ClusterProfile has changed: %+v", profile.Spec)
	}
	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.PolicyRefs = nil })
	w.eventually("the ClusterProfile and the Secret are corrected", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
			return err
		}
		if len(profile.Spec.PolicyRefs) != 1 {
			return fmt.Errorf("policyRefs are %v", profile.Spec.PolicyRefs)
		}
		return w.Get(t.Context(), client.ObjectKeyFromObject(secret), secret)
	})
	w.wantRoles("Roles", "one", want)

	foreign := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: "role-request-" + w.ns + "-foreign"}}
	w.create(foreign)
	other := w.createRoleRequest("foreign")
	w.wantRequestFailure(other, "exists and does not belong to the RoleRequest")
	w.must(w.Delete(t.Context(), other))
	w.eventually("the RoleRequest is deleted", func() error { return w.checkDeleted(other) })
	w.must(w.Delete(t.Context(), foreign))
}
