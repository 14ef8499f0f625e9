package engine

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metadatafake "k8s.io/client-go/metadata/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/release"
)

// manyPages is the number of pages of a cluster with endless pages in these tests. It ends a test in which the limit
// does not work.
const manyPages = 10_000

// newPagingClient returns a client of a cluster that returns copies of items in each page, and counts the pages.
func newPagingClient(items []runtime.RawExtension) (member *memberClient, pages *int) {
	client := metadatafake.NewSimpleMetadataClient(metadatafake.NewTestScheme())
	pages = new(int)
	client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		list := &metav1.List{Items: items}
		if *pages++; *pages < manyPages {
			list.Continue = fmt.Sprint(*pages)
		}
		return true, list, nil
	})
	return &memberClient{metadataClient: client}, pages
}

func TestRebuildEndsWithoutALastPage(t *testing.T) {
	t.Parallel()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Resources"}
	owned := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name: "a", Namespace: "default", UID: "uid", Labels: map[string]string{kube.LabelReason: id.Feature}, Annotations: map[string]string{kube.AnnotationRequestor: id.String()},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: kube.FieldManager, Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", FieldsV1: metav1.NewFieldsV1("{}"),
		}},
	}}
	for name, items := range map[string][]runtime.RawExtension{"objects": {{Object: owned}, {Object: owned}}, "empty pages": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			member, pages := newPagingClient(items)
			limit := kube.NewObjectLimit(300, "objects")
			found, err := member.listMarkedIn(t.Context(), corev1.SchemeGroupVersion.WithResource("configmaps"), corev1.SchemeGroupVersion.WithKind("ConfigMap"), bundleFilter{id: id}, limit)
			if err == nil || err.Error() != "list configmaps: the cluster returned more than 300 objects" {
				t.Errorf("got error %v", err)
			}
			if len(found) > 300 || *pages > 301 || len(items) > 0 && len(found) == 0 {
				t.Errorf("got %d objects in %d pages", len(found), *pages)
			}
		})
	}
}

// TestRebuildLimitsReleases reads a cluster with the records of many releases, and a cluster with endless pages.
func TestRebuildLimitsReleases(t *testing.T) {
	t.Parallel()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Helm"}
	recordsOf := func(releases int) (items []runtime.RawExtension) {
		for i := range releases {
			name := fmt.Sprint("web-", i)
			items = append(items, runtime.RawExtension{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
				Name: release.SecretName(name, 1), Namespace: "default", UID: "uid", Annotations: map[string]string{kube.AnnotationRequestor: id.String()},
				Labels: map[string]string{kube.LabelReason: id.Feature, "owner": "helm", "name": name, "version": "1", "status": "deployed"},
			}}})
		}
		return items
	}
	for releases, want := range map[int]string{
		maxRebuiltReleases + 1: "list release records: the records are of more than 1000 releases",
		100:                    "list release records: the cluster returned more than 100000 release records",
	} {
		member, _ := newPagingClient(recordsOf(releases))
		if _, err := (&Engine{member: member}).rebuildReleases(t.Context(), id); err == nil || err.Error() != want {
			t.Errorf("%d releases: got error %v, want %s", releases, err, want)
		}
	}
}

func TestReadEndsWithoutALastPage(t *testing.T) {
	t.Parallel()
	member, pages := newPagingClient(nil)
	resource := kube.Resource{GVR: corev1.SchemeGroupVersion.WithResource("configmaps"), Namespaced: true}
	var keys []kube.Ref
	for i := range 5 {
		keys = append(keys, kube.Ref{Kind: "ConfigMap", Namespace: "default", Name: fmt.Sprint(i)})
	}
	r := &reader{member: member, abort: func(error) {}, found: map[kube.Ref]*live{}, unread: map[kube.Ref]error{}}
	undecided, err := r.list(t.Context(), collection{resource, "default"}, keys)
	if err != nil || len(undecided) != len(keys) || *pages > listFactor*len(keys) {
		t.Errorf("%d of %d objects are undecided after %d pages, error %v", len(undecided), len(keys), *pages, err)
	}
}
