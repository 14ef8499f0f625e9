package stories

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

// localContent has a template for the hub, and objects for the member. %[1]s is the text in both.
const localContent = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: for-hub, annotations: {projectsveltos.io/template: "true"}}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: local, name: "about-{{ .Cluster.metadata.namespace }}-{{ .Cluster.metadata.name }}"}
    data: {text: %[1]s, cluster: "{{ .Cluster.metadata.name }}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: for-member}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: local, name: remote}
    data: {text: %[1]s}
`

// localProfile has %[1]s as the stopMatchingBehavior, and %[2]s as the deploymentType of the content for the hub.
const localProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: local}
spec:
  clusterSelector: {matchLabels: {env: local}}
  stopMatchingBehavior: %[1]s
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: for-hub, deploymentType: %[2]s}
  - {kind: ConfigMap, namespace: default, name: for-member}
  extraLabels: {team: local}
`

// localWorld is a world with a member in pull mode and one in push mode. Both clusters have the same name.
type localWorld struct {
	*world
	members map[string]*localkube.Plane // by namespace
}

const localCluster = "same"

// TestLocal deploys objects to the hub for a member in pull mode and one in push mode with the same name, together with
// objects on the members.
func TestLocal(t *testing.T) {
	awaitSlot(t)
	w := localWorld{world: newWorld(t)}
	w.grantContent(rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"configmaps", "namespaces", "services"}, Verbs: []string{"*"}})
	w.members = map[string]*localkube.Plane{
		"fleet-pulled": w.pullMember("fleet-pulled", localCluster, "env=local"), "fleet-pushed": w.pushMember("fleet-pushed", localCluster, "env=local"),
	}
	w.apply(w.hub, fmt.Sprintf(localContent, "first"))
	w.apply(w.hub, fmt.Sprintf(localProfile, "WithdrawPolicies", "Local"))
	w.awaitTexts("objects arrive on the hub and on the members", "first")
	w.wantListed()

	w.apply(w.hub, fmt.Sprintf(localContent, "second"))
	w.awaitTexts("a change arrives by itself", "second")
	w.correctsDrift()
	w.refusesBadContent()
	w.restrictsTenants()
	w.keepsWithoutSource()
	w.hubProcess.kill()
	w.startHub()
	w.correctsDrift()
	w.kustomizes()
	w.withdraws()
}

// hubObjectName returns the name of the object on the hub for the cluster in a namespace.
func hubObjectName(namespace string) string { return "about-" + namespace + "-" + localCluster }

// awaitTexts waits until both clusters have their objects with this text, on the hub and on the member.
func (w localWorld) awaitTexts(what, text string) {
	w.t.Helper()
	for namespace, member := range w.members {
		w.eventually(what+" for "+namespace, func() error {
			return errors.Join(
				w.wantObject(w.hub, hubObjectName(namespace), map[string]string{"text": text, "cluster": localCluster}),
				w.wantObject(member, "remote", map[string]string{"text": text}),
				w.wantStatuses(namespace, "local-sveltos-"+localCluster, "Provisioned"),
			)
		})
	}
}

// wantObject returns an error unless a ConfigMap has the data and the label of the profile.
func (w localWorld) wantObject(plane *localkube.Plane, name string, data map[string]string) error {
	found := &corev1.ConfigMap{}
	if err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: "local", Name: name}, found); err != nil {
		return err
	}
	if diff := cmp.Diff(data, found.Data); diff != "" || found.Labels["team"] != "local" {
		return fmt.Errorf("ConfigMap %s has labels %v and data (-want +got):\n%s", name, found.Labels, diff)
	}
	return nil
}

// wantListed waits until the ClusterConfigurations list the objects on the hub and on the member.
func (w localWorld) wantListed() {
	w.t.Helper()
	for namespace := range w.members {
		want := []string{"Remote ConfigMap local/remote", "Local ConfigMap local/" + hubObjectName(namespace)}
		w.eventually("the objects are listed", func() error {
			found := &configv1beta1.ClusterConfiguration{}
			if err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: "sveltos--" + localCluster}, found); err != nil {
				return err
			}
			var got []string
			for _, profile := range found.Status.ClusterProfileResources {
				for _, feature := range profile.Features {
					for _, r := range feature.Resources {
						got = append(got, fmt.Sprintf("%s %s %s/%s", r.DeploymentType, r.Kind, r.Namespace, r.Name))
					}
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("ClusterConfiguration (-want +got):\n%s", diff)
			}
			return nil
		})
	}
}

// correctsDrift changes one object on the hub and deletes the other.
func (w localWorld) correctsDrift() {
	w.t.Helper()
	changed := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "local", Name: hubObjectName("fleet-pulled")}}
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"data":{"text":"drift"}}`))
	if err := w.client(w.hub).Patch(w.t.Context(), changed, patch); err != nil {
		w.t.Fatal(err)
	}
	deleted := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "local", Name: hubObjectName("fleet-pushed")}}
	if err := w.client(w.hub).Delete(w.t.Context(), deleted); err != nil {
		w.t.Fatal(err)
	}
	w.awaitTexts("drift is corrected", "second")
}

// refusesBadContent delivers content that the API server or Towline refuses, and an object that another cluster has.
func (w localWorld) refusesBadContent() {
	w.t.Helper()
	before := w.fingerprints(w.hub, "local")
	for what, bad := range map[string]struct {
		object string
		want   []string
	}{
		"the API server": {`{apiVersion: v1, kind: Service, metadata: {namespace: local, name: bad}, spec: {ports: [{port: 99999999}]}}`, []string{"on the hub (deploymentType Local)", "Service local/bad", "port"}},
		"Towline":        {`{apiVersion: v1, kind: Secret, metadata: {namespace: projectsveltos, name: bad}}`, []string{"on the hub (deploymentType Local)", "Secret projectsveltos/bad", "belongs to Towline"}},
		"another kind":   {`{apiVersion: lib.projectsveltos.io/v1beta1, kind: ConfigurationGroup, metadata: {namespace: local, name: bad}}`, []string{"on the hub (deploymentType Local)", "ConfigurationGroup", "belongs to Towline"}},
	} {
		w.apply(w.hub, strings.Replace(fmt.Sprintf(localContent, "second"), "  objects.yaml: |\n", "  bad.yaml: '"+bad.object+"'\n  objects.yaml: |\n", 1))
		for namespace := range w.members {
			w.awaitFailureReport(namespace, "local-sveltos-"+localCluster, bad.want)
		}
		if diff := cmp.Diff(before, w.fingerprints(w.hub, "local")); diff != "" {
			w.t.Errorf("refused by %s: objects on the hub (-before +after):\n%s", what, diff)
		}
		w.apply(w.hub, fmt.Sprintf(localContent, "second"))
		w.awaitTexts("the content is valid again", "second")
	}
	w.apply(w.hub, sharedLocal)
	w.eventually("one of two clusters has the same object, and the other one a conflict", func() error {
		provisioned := 0
		var messages []string
		for namespace := range w.members {
			found := &configv1beta1.ClusterSummary{}
			if err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: "shared-sveltos-" + localCluster}, found); err != nil {
				return err
			}
			for _, feature := range found.Status.FeatureSummaries {
				if feature.Status == libv1beta1.FeatureStatusProvisioned {
					provisioned++
				}
				messages = append(messages, feature.FailureMessage)
			}
		}
		if text := strings.Join(messages, " "); provisioned != 1 || !strings.Contains(text, "A conflict was detected while deploying resource ConfigMap:local/shared") {
			return fmt.Errorf("%d clusters are provisioned, with the messages %q", provisioned, messages)
		}
		return nil
	})
	w.kubectl(w.hub, "delete", "clusterprofile", "shared")
	w.eventually("the object of both clusters is withdrawn", func() error { return w.wantAbsent("local", "shared") })
}

const sharedLocal = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: shared}
data: {objects.yaml: '{apiVersion: v1, kind: ConfigMap, metadata: {namespace: local, name: shared}}'}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: shared}
spec:
  clusterSelector: {matchLabels: {env: local}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: shared, deploymentType: Local}]
`

// wantAbsent returns an error if the hub has a ConfigMap.
func (w localWorld) wantAbsent(namespace, name string) error {
	return w.wantMissing(w.hub, &corev1.ConfigMap{}, name, namespace)
}

// localTenant is a Profile with the labels %[1]s, whose content for the hub is a ConfigMap in namespace %[2]s.
const localTenant = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: fleet-pushed, name: tenant-content}
data: {objects.yaml: '{apiVersion: v1, kind: ConfigMap, metadata: {namespace: %[2]s, name: tenant}}'}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: Profile
metadata: {namespace: fleet-pushed, name: tenant, labels: {%[1]s}}
spec:
  clusterSelector: {matchLabels: {env: local}}
  policyRefs: [{kind: ConfigMap, name: tenant-content, deploymentType: Local}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {namespace: fleet-pushed, name: tenant}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {namespace: fleet-pushed, name: tenant}
rules: [{apiGroups: [""], resources: [configmaps], verbs: [create, patch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {namespace: fleet-pushed, name: tenant}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: tenant}
subjects: [{kind: ServiceAccount, namespace: fleet-pushed, name: tenant}]
`

// restrictsTenants deploys a Profile to the hub as a ServiceAccount of its namespace only.
func (w localWorld) restrictsTenants() {
	w.t.Helper()
	const label = "projectsveltos.io/serviceaccount-"
	for _, refused := range []struct {
		labels, namespace string
		want              []string
	}{
		{"", "fleet-pushed", []string{"a Profile deploys to the hub as a ServiceAccount", label + "name"}},
		{label + "name: tenant, " + label + "namespace: kube-system", "fleet-pushed", []string{"of its own namespace fleet-pushed", "kube-system"}},
		{label + "name: tenant", "local", []string{"ConfigMap local/tenant", "system:serviceaccount:fleet-pushed:tenant", "cannot patch"}},
	} {
		w.apply(w.hub, fmt.Sprintf(localTenant, refused.labels, refused.namespace))
		w.awaitFailureReport("fleet-pushed", "p--tenant-sveltos-"+localCluster, refused.want)
		if err := w.wantAbsent(refused.namespace, "tenant"); err != nil {
			w.t.Error(err)
		}
	}
	w.apply(w.hub, fmt.Sprintf(localTenant, label+"name: tenant", "fleet-pushed"))
	w.awaitProvisioned("fleet-pushed", "p--tenant-sveltos-"+localCluster)
	if _, err := w.data(w.hub, "fleet-pushed", "tenant"); err != nil {
		w.t.Error(err)
	}
	w.kubectl(w.hub, "delete", "profile", "-n", "fleet-pushed", "tenant")
	w.eventually("the object of the Profile is withdrawn", func() error { return w.wantAbsent("fleet-pushed", "tenant") })
}

// keepsWithoutSource deletes the content for the hub, which deletes no object.
func (w localWorld) keepsWithoutSource() {
	w.t.Helper()
	before := w.fingerprints(w.hub, "local")
	w.kubectl(w.hub, "delete", "configmap", "for-hub")
	for namespace := range w.members {
		w.awaitFailureReport(namespace, "local-sveltos-"+localCluster, []string{"on the hub (deploymentType Local)", "default/for-hub"})
	}
	if diff := cmp.Diff(before, w.fingerprints(w.hub, "local")); diff != "" {
		w.t.Errorf("without the source: objects on the hub (-before +after):\n%s", diff)
	}
	w.apply(w.hub, fmt.Sprintf(localContent, "second"))
	w.awaitTexts("the source exists again", "second")
}

// localKustomization is a kustomization for the hub.
const localKustomization = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: kustomized}
data:
  kustomization.yaml: |
    resources: [object.yaml]
    nameSuffix: -kustomized
  object.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {name: '{{ .namespace }}', labels: {team: local}}
    data: {text: third}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: kustomized}
spec:
  clusterSelector: {matchLabels: {env: local}}
  kustomizationRefs:
  - kind: ConfigMap
    namespace: default
    name: kustomized
    deploymentType: Local
    targetNamespace: local
    values: {namespace: '{{ .Cluster.metadata.namespace }}'}
`

// kustomizes deploys a kustomization to the hub, and withdraws it.
func (w localWorld) kustomizes() {
	w.t.Helper()
	w.apply(w.hub, localKustomization)
	for namespace, member := range w.members {
		name := namespace + "-kustomized"
		w.eventually("the kustomization for "+namespace+" is on the hub", func() error {
			return w.wantObject(w.hub, name, map[string]string{"text": "third"})
		})
		if err := w.wantMissing(member, &corev1.ConfigMap{}, name, "local"); err != nil {
			w.t.Errorf("on the member of %s: %v", namespace, err)
		}
	}
	w.kubectl(w.hub, "delete", "clusterprofile", "kustomized")
	for namespace := range w.members {
		w.eventually("the kustomization for "+namespace+" is withdrawn", func() error { return w.wantAbsent("local", namespace+"-kustomized") })
	}
}

// withdraws changes the content to Remote and back while a member is unreachable, stops a cluster from matching, and
// deregisters the other one.
func (w localWorld) withdraws() {
	w.t.Helper()
	w.apply(w.hub, fmt.Sprintf(localProfile, "WithdrawPolicies", "Remote"))
	for namespace, member := range w.members {
		w.eventually("the content moves to "+namespace, func() error {
			return errors.Join(w.wantAbsent("local", hubObjectName(namespace)), w.wantObject(member, hubObjectName(namespace), map[string]string{"text": "second", "cluster": localCluster}))
		})
	}
	w.apply(w.hub, fmt.Sprintf(localProfile, "WithdrawPolicies", "Local"))
	w.awaitTexts("the content moves back", "second")

	w.kubectl(w.hub, "label", "sveltoscluster", "-n", "fleet-pulled", localCluster, "env=other", "--overwrite")
	w.eventually("the cluster no longer matches", func() error { return w.wantAbsent("local", hubObjectName("fleet-pulled")) })
	if err := w.wantObject(w.hub, hubObjectName("fleet-pushed"), map[string]string{"text": "second", "cluster": localCluster}); err != nil {
		w.t.Error(err)
	}
	w.kubectl(w.hub, "label", "sveltoscluster", "-n", "fleet-pulled", localCluster, "env=local", "--overwrite")
	w.awaitTexts("the cluster matches again", "second")

	w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet-pulled", "--cluster="+localCluster)
	w.eventually("the deregistered cluster has nothing on the hub", func() error { return w.wantAbsent("local", hubObjectName("fleet-pulled")) })

	if err := w.members["fleet-pushed"].Stop(); err != nil {
		w.t.Fatal(err)
	}
	w.kubectl(w.hub, "delete", "clusterprofile", "local", "--wait=false")
	w.eventually("the objects on the hub of an unreachable member are withdrawn", func() error { return w.wantAbsent("local", hubObjectName("fleet-pushed")) })
}
