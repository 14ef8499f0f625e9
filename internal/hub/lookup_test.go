package hub_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
)

// registerRestrictedMember registers the control plane as a push member with the kubeconfig of a ServiceAccount without
// permissions. It returns the ServiceAccount.
func (w *world) registerRestrictedMember(name string) rbacv1.Subject {
	w.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "restricted"}}
	w.create(account)
	token := &authenticationv1.TokenRequest{}
	w.must(w.SubResource("token").Create(w.Context(), account, token))
	config, err := clientcmd.LoadFromFile(w.plane.Kubeconfig)
	w.must(err)
	for user := range config.AuthInfos {
		config.AuthInfos[user] = &clientcmdapi.AuthInfo{Token: token.Status.Token}
	}
	raw, err := clientcmd.Write(*config)
	w.must(err)
	w.registerPushMemberWith(name, raw)
	return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: account.Namespace, Name: account.Name}
}

// grantRead gives an account the permission to read resources of the core group in a namespace.
func (w *world) grantRead(account rbacv1.Subject, namespace string, resources ...string) {
	w.Helper()
	meta := metav1.ObjectMeta{Namespace: namespace, Name: "reads-" + resources[0]}
	w.create(&rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, Verbs: []string{"get", "list"}}}})
	w.create(&rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{account}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: meta.Name},
	})
}

// TestLookupHasTheRightsOfTheHubOnAPushMember deploys a chart that reads a ConfigMap and then a Secret of the member,
// where the hub may read the Secret only at the end. The hub itself may read all Secrets of the control plane.
func TestLookupHasTheRightsOfTheHubOnAPushMember(t *testing.T) {
	w := newWorld(t)
	releases := w.plane.Namespace(t, "releases")
	w.createConfigMap("open", "allowed")
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "closed"}, Data: map[string][]byte{"content": []byte("secret")}})
	account := w.registerRestrictedMember("one")
	w.grantRead(account, releases, "secrets") // the release records
	w.grantRead(account, w.ns, "configmaps")

	address := w.serveCharts(examples.Chart{Files: map[string]string{"templates/seen.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\n" +
		`data: {open: "{{ (lookup "v1" "ConfigMap" .Values.from "open").data.content }}"` +
		`{{ with .Values.secret }}, closed: "{{ (lookup "v1" "Secret" $.Values.from .).data.content | b64dec }}"{{ end }}}` + "\n"}})
	values := fmt.Sprintf("from: %s\n", w.ns)
	profile := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) { c.ReleaseNamespace, c.Values = releases, values }))
	want := func(status libv1beta1.FeatureStatus, message string, data map[string]string) {
		t.Helper()
		w.wantFeature(profile, "one", helm(status, message))
		got, err := w.readSeen("one")
		w.must(err)
		if diff := cmp.Diff(data, got); diff != "" {
			t.Errorf("data of the release that is %s (-want +got):\n%s", status, diff)
		}
	}
	want(libv1beta1.FeatureStatusProvisioned, "", map[string]string{"open": "allowed"})

	update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].Values = values + "secret: closed\n" })
	message := fmt.Sprintf(`helm release %[1]s/hello: render chart hello 0.1.0: look up v1 Secret %[2]s/closed: secrets "closed" is forbidden: `+
		`User "system:serviceaccount:%[2]s:restricted" cannot get resource "secrets" in API group "" in the namespace "%[2]s"`, releases, w.ns)
	want(libv1beta1.FeatureStatusFailed, message, map[string]string{"open": "allowed"})

	w.grantRead(account, w.ns, "secrets")
	want(libv1beta1.FeatureStatusProvisioned, "", map[string]string{"open": "allowed", "closed": "secret"})
}

// TestLookupHasTheRightsOfTheServiceAccount deploys a chart of a profile whose labels name a ServiceAccount of the
// member. The hub may read all Secrets of the member.
func TestLookupHasTheRightsOfTheServiceAccount(t *testing.T) {
	w := newWorld(t)
	releases := w.plane.Namespace(t, "releases")
	w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "closed"}, Data: map[string][]byte{"content": []byte("secret")}})
	kubeconfig, err := os.ReadFile(w.plane.Kubeconfig)
	w.must(err)
	w.registerPushMemberWith("one", kubeconfig)
	address := w.serveCharts(examples.Chart{Files: map[string]string{"templates/seen.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\n" +
		`data: {closed: "{{ (lookup "v1" "Secret" .Values.from "closed").data.content | b64dec }}"}` + "\n"}})
	profile := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) {
		c.ReleaseNamespace, c.Values = releases, fmt.Sprintf("from: %s\n", w.ns)
	}))
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	label := func(name string) {
		update(w, profile, func(p *configv1beta1.ClusterProfile) {
			p.Labels = map[string]string{libv1beta1.ServiceAccountNamespaceLabel: w.ns, libv1beta1.ServiceAccountNameLabel: name}
		})
	}
	label("tenant")
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusFailed, fmt.Sprintf(`helm release %[1]s/hello: render chart hello 0.1.0: look up v1 Secret %[2]s/closed: `+
		`secrets "closed" is forbidden: User "system:serviceaccount:%[2]s:tenant" cannot get resource "secrets" in API group "" in the namespace "%[2]s"`, releases, w.ns)))
	w.grantRead(rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: w.ns, Name: "tenant"}, w.ns, "secrets")
	w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
}
