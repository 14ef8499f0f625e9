package stories

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const boatsDefinition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.stories.towline.dev}
spec:
  group: stories.towline.dev
  names: {kind: Boat, listKind: BoatList, plural: boats, singular: boat}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`

// resourcesProfiles are two profiles with the same objects. The first one ignores more changes.
const resourcesProfiles = `
apiVersion: v1
kind: Secret
metadata: {namespace: default, name: login}
stringData: {password: %[1]s}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: size}
data: {watched: "1", other: "1"}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: result, annotations: {projectsveltos.io/template: ""}}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: site, name: result}
    data:
      password: {{ b64dec .MgmtResources.Login.data.password }}
      sails: "{{ .MgmtResources.Anna.spec.sails }}"
      place: "{{ getField "Anna" "status.place" }}"
      watched: "{{ .MgmtResources.Size.data.watched }}"
      other: "{{ .MgmtResources.Size.data.other }}"
      extra: "{{ getField "Extra" "data.text" }}"
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: marker, annotations: {projectsveltos.io/template: ""}}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: site, name: marker}
    data:
      place: "{{ getField "Anna" "status.place" }}"
      other: "{{ getField "Size" "data.other" }}"
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: result}
spec:
  clusterSelector: {matchLabels: {env: resources}}
  templateResourceRefs:
  - {identifier: Login, resource: {kind: Secret, namespace: default, name: login}}
  - {identifier: Anna, ignoreStatusChanges: true, resource: {apiVersion: stories.towline.dev/v1, kind: Boat, namespace: default, name: anna}}
  - {identifier: Size, watchFields: [data.watched], resource: {apiVersion: v1, kind: ConfigMap, namespace: default, name: size}}
  - {identifier: Extra, optional: true, resource: {apiVersion: v1, kind: ConfigMap, name: "extra-{{ .ClusterName }}"}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: result}]
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: marker}
spec:
  clusterSelector: {matchLabels: {env: resources}}
  templateResourceRefs:
  - {identifier: Anna, resource: {apiVersion: stories.towline.dev/v1, kind: Boat, namespace: default, name: anna}}
  - {identifier: Size, resource: {apiVersion: v1, kind: ConfigMap, namespace: default, name: size}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: marker}]
`

// tenantProfile is a Profile in the namespace of a cluster, %[1]s; %[2]s is the object that it refers to.
const tenantProfile = `
apiVersion: config.projectsveltos.io/v1beta1
kind: Profile
metadata: {namespace: %[1]s, name: tenant}
spec:
  clusterSelector: {matchLabels: {env: resources}}
  templateResourceRefs: [{identifier: Theirs, resource: %[2]s}]
  policyRefs: [{kind: ConfigMap, namespace: %[1]s, name: tenant, optional: true}]
`

// resourcesStory is a hub with a pull and a push member.
type resourcesStory struct {
	*world
	members    map[string]*localkube.Plane
	namespaces map[string]string
	anna       *unstructured.Unstructured
}

// TestTemplateResources changes objects of the hub that templates read. Relevant changes are delivered, other changes
// are not, and a missing object is reported and changes nothing.
func TestTemplateResources(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.grantContent(rbacv1.PolicyRule{APIGroups: []string{"stories.towline.dev"}, Resources: []string{"boats"}, Verbs: []string{"get", "list", "watch"}})
	s := &resourcesStory{world: w, namespaces: map[string]string{"pull-1": "edge", "push-1": "cloud"}, members: map[string]*localkube.Plane{
		"pull-1": w.pullMember("edge", "pull-1", "env=resources"), "push-1": w.pushMember("cloud", "push-1", "env=resources"),
	}}
	payloads := w.watchPayloads()
	w.apply(w.hub, fmt.Sprintf(resourcesProfiles, password))
	s.awaitReports("result", "templateResourceRefs Anna", "Boat default/anna", "the hub has no kind Boat in stories.towline.dev/v1")
	s.createAnna()
	want := map[string]string{"password": password, "sails": "1", "place": "", "watched": "1", "other": "1", "extra": ""}
	s.wantResult(want)

	s.ignoresUnreadFields(want)
	w.setLogin("other-password")
	want["password"] = "other-password"
	s.wantResult(want)
	for cluster, namespace := range s.namespaces {
		w.apply(w.hub, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: %s, name: extra-%s}\ndata: {text: there}\n", namespace, cluster))
	}
	want["extra"] = "there"
	s.wantResult(want)

	before := s.resultVersions()
	w.kubectl(w.hub, "delete", "secret", "login", "-n", "default")
	s.awaitReports("result", "templateResourceRefs Login", "Secret default/login does not exist")
	if diff := cmp.Diff(before, s.resultVersions()); diff != "" {
		t.Errorf("after the deletion of the Secret (-want +got):\n%s", diff)
	}
	w.setLogin("third-password")
	want["password"] = "third-password"
	s.wantResult(want)
	w.hubProcess.kill()
	w.setLogin("password-of-a-hub-that-was-away")
	w.startHub()
	want["password"] = "password-of-a-hub-that-was-away"
	s.wantResult(want)

	s.restrictsTenants()
	for _, content := range payloads.contents(w)[kube.AgentNamespace] {
		if strings.Contains(content, "password") {
			t.Errorf("a shared bundle has data of the Secret: %s", content)
		}
	}
}

// setLogin creates or changes the Secret.
func (w *world) setLogin(password string) {
	w.t.Helper()
	w.apply(w.hub, "apiVersion: v1\nkind: Secret\nmetadata: {namespace: default, name: login}\nstringData: {password: "+password+"}\n")
}

// createAnna installs a kind and creates an object of it.
func (s *resourcesStory) createAnna() {
	s.t.Helper()
	s.apply(s.hub, boatsDefinition)
	s.anna = &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "stories.towline.dev/v1", "kind": "Boat", "metadata": map[string]any{"namespace": "default", "name": "anna"},
		"spec": map[string]any{"sails": int64(1)},
	}}
	s.eventually("the kind Boat is served", func() error {
		return client.IgnoreAlreadyExists(s.client(s.hub).Create(s.t.Context(), s.anna.DeepCopy()))
	})
	if err := s.client(s.hub).Get(s.t.Context(), client.ObjectKeyFromObject(s.anna), s.anna); err != nil {
		s.t.Fatal(err)
	}
}

// ignoresUnreadFields changes the status of one object and a field of another one. The second profile shows that the
// hub has read the change.
func (s *resourcesStory) ignoresUnreadFields(want map[string]string) {
	s.t.Helper()
	before, requests := s.resultVersions(), s.requests(s.hub)
	s.setAnna("harbour", "status", "place")
	if err := s.client(s.hub).Status().Update(s.t.Context(), s.anna); err != nil {
		s.t.Fatal(err)
	}
	s.wantData("marker", map[string]string{"place": "harbour", "other": "1"})
	s.apply(s.hub, "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: size}\ndata: {watched: '1', other: '2'}\n")
	s.wantData("marker", map[string]string{"place": "harbour", "other": "2"})
	if diff := cmp.Diff(before, s.resultVersions()); diff != "" {
		s.t.Errorf("results after irrelevant changes (-want +got):\n%s", diff)
	}
	// Only the marker of the pull member was written, twice.
	creation := localkube.Request{Verb: "POST", Group: libv1beta1.GroupVersion.Group, Resource: "configurationbundles"}
	if got := s.requests(s.hub).Since(requests)[creation]; got != 2 {
		s.t.Errorf("%d bundles were written, want 2 for the marker", got)
	}

	s.setAnna(int64(2), "spec", "sails")
	if err := s.client(s.hub).Update(s.t.Context(), s.anna); err != nil {
		s.t.Fatal(err)
	}
	want["sails"], want["place"] = "2", "harbour"
	s.wantResult(want)
	s.apply(s.hub, "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: size}\ndata: {watched: '3', other: '3'}\n")
	want["watched"], want["other"] = "3", "3"
	s.wantResult(want)
}

func (s *resourcesStory) setAnna(value any, path ...string) {
	s.t.Helper()
	if err := unstructured.SetNestedField(s.anna.Object, value, path...); err != nil {
		s.t.Fatal(err)
	}
}

// restrictsTenants has a Profile refer to objects that it must not read.
func (s *resourcesStory) restrictsTenants() {
	s.t.Helper()
	secrets := map[string]string{"pull-1": join.AnchorSecret("pull-1"), "push-1": "push-1-sveltos-kubeconfig"}
	for resource, text := range map[string]string{
		"{kind: ConfigMap, namespace: default, name: size}":         "ConfigMap default/size: a Profile reads its own namespace %[1]s only",
		"{kind: Node, name: node}":                                  "Node node has no namespace: a Profile reads its own namespace %[1]s only",
		"{kind: Secret, name: %[2]s}":                               "Secret %[1]s/%[2]s: its type is",
		"{kind: Secret, namespace: '{{ .Cluster.kind }}', name: x}": "Secret SveltosCluster/x: a Profile reads its own namespace %[1]s only",
	} {
		filled := map[string]*strings.Replacer{}
		for cluster, namespace := range s.namespaces {
			filled[cluster] = strings.NewReplacer("%[1]s", namespace, "%[2]s", secrets[cluster])
			s.apply(s.hub, fmt.Sprintf(tenantProfile, namespace, filled[cluster].Replace(resource)))
		}
		for cluster, namespace := range s.namespaces {
			s.awaitFailureReport(namespace, "p--tenant-sveltos-"+cluster, []string{"templateResourceRefs Theirs", filled[cluster].Replace(text)})
		}
	}
}

// awaitReports waits until the summaries of a profile report the failure.
func (s *resourcesStory) awaitReports(profile string, texts ...string) {
	s.t.Helper()
	for cluster, namespace := range s.namespaces {
		s.awaitFailureReport(namespace, profile+"-sveltos-"+cluster, texts)
	}
}

// resultVersions returns the versions of the result on the members, and of the group on the hub.
func (s *resourcesStory) resultVersions() map[string]string {
	s.t.Helper()
	versions := map[string]string{}
	for cluster, plane := range s.members {
		versions[cluster] = s.fingerprints(plane, "site")["ConfigMap result"].ResourceVersion
	}
	var groups libv1beta1.ConfigurationGroupList
	if err := s.client(s.hub).List(s.t.Context(), &groups); err != nil {
		s.t.Fatal(err)
	}
	for _, group := range groups.Items {
		if ref := group.Spec.SourceRef; ref != nil && ref.Name == "result-sveltos-pull-1" {
			versions["group"] = base64.StdEncoding.EncodeToString(group.Spec.RequestorHash)
		}
	}
	if len(versions) != 3 || versions["pull-1"] == "" || versions["push-1"] == "" {
		s.t.Fatalf("the results are %v", versions)
	}
	return versions
}

// wantResult waits until both members have the result with these data.
func (s *resourcesStory) wantResult(want map[string]string) {
	s.t.Helper()
	s.wantData("result", want)
	for cluster, namespace := range s.namespaces {
		s.awaitProvisioned(namespace, "result-sveltos-"+cluster)
	}
}

func (s *resourcesStory) wantData(name string, want map[string]string) {
	s.t.Helper()
	for cluster, plane := range s.members {
		s.eventually("ConfigMap "+name+" on "+cluster, func() error {
			got, err := s.data(plane, "site", name)
			if diff := cmp.Diff(want, got); err == nil && diff != "" {
				err = fmt.Errorf("it differs (-want +got):\n%s", diff)
			}
			return err
		})
	}
}
