package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

const (
	// adoptedObject exists on each member before content-0 adopts it. Another client has set othersKey in its data.
	adoptedObject = "content-0-adopted"
	othersKey     = "others"
	// adoptedText is its text in the profile, and textBefore the text before.
	adoptedText = "adopted"
	textBefore  = "before the adoption"
	// othersLabel is a label that another client sets on managed objects. Its value is foreignOwner.
	othersLabel = "example.com/marked-by"
	// anyHash replaces the hash in an annotation.
	anyHash = "any"
)

// compareManaged compares all objects on a member that have the ownership label of Towline, of all kinds and in all
// namespaces: their keys, labels, annotations, owners and whole content. Release records are compared elsewhere.
func compareManaged(ctx context.Context, m *model, on *member) error {
	managed, err := listManaged(ctx, on)
	if err != nil {
		return err
	}
	found := map[string]string{}
	for i := range managed {
		object := &managed[i]
		key := describe(object.GetKind(), object)
		if object.GetUID() == on.labelled[key] {
			labels := object.GetLabels()
			if labels[othersLabel] != foreignOwner {
				return fmt.Errorf("%s has lost the label of others: %v", key, labels)
			}
			delete(labels, othersLabel)
			object.SetLabels(labels)
		}
		found[key] = normalized(object)
		if slices.Contains(fixedChartObjects(), key) {
			found[key] = strings.ReplaceAll(found[key], on.name, "member")
			if m.chartContent[key] == "" {
				m.chartContent[key] = found[key]
			}
		}
	}
	want := m.managedObjects(on.name)
	if on.hasLeft {
		delete(want, chartDefinition)
		delete(found, chartDefinition)
	}
	if diff := gocmp.Diff(want, found); diff != "" {
		return fmt.Errorf("managed objects (-want +got):\n%s", diff)
	}
	return compareAdopted(ctx, on)
}

// fixedChartObjects returns the objects of the chart that are the same in all its editions.
func fixedChartObjects() []string {
	return []string{
		"ConfigMap charted/charted-greeting", "ConfigMap charted/charted-page", "Deployment charted/charted", "Service charted/charted",
		"Greeting charted/charted", chartDefinition,
	}
}

// chartDefinition is in the directory crds of the chart. As with Helm it stays after an uninstallation, and the next
// installation does not manage it.
const chartDefinition = "CustomResourceDefinition /greetings.charted.examples.towline.dev"

// compareAdopted checks that adoptedObject has the same UID as before, and the data of the other client.
func compareAdopted(ctx context.Context, on *member) error {
	adopted := &corev1.ConfigMap{}
	if err := on.admin.Get(ctx, client.ObjectKey{Namespace: contentNamespace, Name: adoptedObject}, adopted); err != nil {
		return fmt.Errorf("read the object that a profile adopts: %w", err)
	}
	hasText := adopted.Data["text"] == adoptedText || adopted.Data["text"] == textBefore
	if adopted.UID != on.adopted || !hasText || adopted.Data[othersKey] != foreignOwner || len(adopted.Data) != 2 {
		return fmt.Errorf("%s has uid %s and %v; its uid was %s", adoptedObject, adopted.UID, adopted.Data, on.adopted)
	}
	return nil
}

// labelManaged sets the label of another client on a managed object of a member.
func (f *fleet) labelManaged(m *model, on *member) {
	f.t.Helper()
	for _, p := range m.selected(on.name) {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: contentNamespace, Name: p.name + "-kept"}}
		patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, othersLabel, foreignOwner)
		f.retry("label an object of "+on.name, func() error {
			return on.admin.Patch(f.t.Context(), object, client.RawPatch("application/merge-patch+json", []byte(patch)))
		})
		on.labelled[describe("ConfigMap", object)] = object.UID
	}
}

// createAdopted creates the object that a profile adopts.
func (f *fleet) createAdopted(m *member) {
	f.t.Helper()
	object := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: contentNamespace, Name: adoptedObject},
		Data:       map[string]string{"text": textBefore, othersKey: foreignOwner},
	}
	f.retry("create the object that a profile adopts", func() error { return m.admin.Create(f.t.Context(), object) })
	m.adopted = object.UID
}

// listManaged lists the objects on a member that have the ownership label of Towline, except for objects of others and
// release records.
func listManaged(ctx context.Context, on *member) ([]unstructured.Unstructured, error) {
	discoveryClient, err := discovery.NewDiscoveryClientForConfig(on.plane.Config)
	if err != nil {
		return nil, err
	}
	served, err := discoveryClient.ServerPreferredResources()
	if err != nil {
		return nil, fmt.Errorf("list the kinds: %w", err)
	}
	var all []unstructured.Unstructured
	for _, group := range served {
		for _, resource := range group.APIResources {
			if !slices.Contains(resource.Verbs, "list") {
				continue
			}
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(schema.FromAPIVersionAndKind(group.GroupVersion, resource.Kind+"List"))
			if err := on.admin.List(ctx, list, client.HasLabels{kube.LabelReason}); err != nil {
				return nil, fmt.Errorf("list objects of kind %s: %w", resource.Kind, err)
			}
			all = append(all, list.Items...)
		}
	}
	return slices.DeleteFunc(all, func(object unstructured.Unstructured) bool {
		meta := metav1.ObjectMeta{Namespace: object.GetNamespace(), Name: object.GetName(), Labels: object.GetLabels(), Annotations: object.GetAnnotations()}
		_, isRecord := release.ParseEntry(meta)
		// Kubernetes copies the labels of a Service to its endpoints.
		isOfService := object.GetKind() == "Endpoints" || object.GetKind() == "EndpointSlice"
		return isForeign(&object) || isRecord && object.GetKind() == "Secret" || isOfService
	}), nil
}

// normalized returns an object as text, without status, the fields that differ between clusters, and the value of its
// hash.
func normalized(object *unstructured.Unstructured) string {
	content := object.DeepCopy()
	for _, field := range []string{"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"} {
		unstructured.RemoveNestedField(content.Object, "metadata", field)
	}
	unstructured.RemoveNestedField(content.Object, "status")
	for _, field := range []string{"clusterIP", "clusterIPs"} {
		unstructured.RemoveNestedField(content.Object, "spec", field)
	}
	if annotations := content.GetAnnotations(); annotations[kube.AnnotationHash] != "" {
		annotations[kube.AnnotationHash] = anyHash
		content.SetAnnotations(annotations)
	}
	text, err := json.MarshalIndent(content.Object, "", "  ")
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// managedObjects returns the objects that a member must have, with Towline's labels and annotations, as text by kind
// and key.
func (m *model) managedObjects(member string) map[string]string {
	all := map[string]string{}
	add := func(object map[string]any) {
		content := &unstructured.Unstructured{Object: object}
		all[describe(content.GetKind(), content)] = normalized(content)
	}
	for _, p := range m.selected(member) {
		for name, text := range p.objects() {
			marks := marksOf(p.name, member, libv1beta1.FeatureResources)
			maps.Copy(marks, map[string]any{
				kube.AnnotationReferenceKind: "ConfigMap", kube.AnnotationReferenceNS: "default", kube.AnnotationReferenceName: p.name,
				kube.AnnotationReferenceTier: "100",
			})
			data := map[string]any{"text": text}
			if name == adoptedObject {
				marks[kube.AnnotationAdopted] = "true"
				data[othersKey] = foreignOwner
			}
			add(configMap(contentNamespace, name, map[string]any{kube.LabelReason: string(libv1beta1.FeatureResources)}, marks, data))
		}
	}
	if _, isRegistered := m.env[member]; isRegistered {
		for _, key := range fixedChartObjects() {
			all[key] = m.chartContent[key]
		}
		marks := marksOf(chartProfile, member, libv1beta1.FeatureHelm)
		marks["meta.helm.sh/release-name"], marks["meta.helm.sh/release-namespace"] = chartProfile, chartProfile
		labels := map[string]any{kube.LabelReason: string(libv1beta1.FeatureHelm), "app.kubernetes.io/managed-by": "Helm"}
		add(configMap(chartProfile, chartObject, labels, marks, map[string]any{"edition": fmt.Sprint(m.chart)}))
	}
	return all
}

// marksOf returns the ownership annotations of an object of a profile.
func marksOf(profile, member string, feature libv1beta1.FeatureID) map[string]any {
	id := bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: summaryName(profile, member), Feature: string(feature)}
	return map[string]any{
		kube.AnnotationHash: anyHash, kube.AnnotationRequestor: id.String(),
		kube.AnnotationOwnerKind: configv1beta1.ClusterProfileKind, kube.AnnotationOwnerName: profile, kube.AnnotationOwnerTier: "100",
	}
}

func configMap(namespace, name string, labels, annotations, data map[string]any) map[string]any {
	return map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "data": data,
		"metadata": map[string]any{"namespace": namespace, "name": name, "labels": labels, "annotations": annotations},
	}
}
