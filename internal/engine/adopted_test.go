package engine_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// replace replaces an object by its manifest like "kubectl replace": the UID stays, and the ownership annotations are
// deleted.
func (c *cluster) replace(gvr schema.GroupVersionResource, obj *unstructured.Unstructured) {
	c.t.Helper()
	obj = obj.DeepCopy()
	obj.SetUID("")
	obj.SetManagedFields(nil)
	obj.SetLabels(nil)
	obj.SetAnnotations(nil)
	obj.SetResourceVersion("")
	opts := metav1.UpdateOptions{FieldManager: "another"}
	if _, err := c.objects.Resource(gvr).Namespace(obj.GetNamespace()).Update(c.t.Context(), obj, opts); err != nil {
		c.t.Fatal(err)
	}
}

// deleteAdoptedAnnotation deletes the annotation of adoption from an object, and no other ownership annotation.
func (c *cluster) deleteAdoptedAnnotation(name string) {
	c.t.Helper()
	c.patch(configMaps, name, `{"metadata":{"annotations":{"`+kube.AnnotationAdopted+`":null}}}`)
}

func (c *cluster) wantOrphaned(name string) {
	c.t.Helper()
	obj := c.get(configMaps, c.ns, name)
	if obj == nil {
		c.t.Errorf("%s existed before, and was deleted", name)
	} else if len(obj.GetAnnotations()) > 0 || len(obj.GetLabels()) > 0 {
		c.t.Errorf("%s still has ownership annotations: %v %v", name, obj.GetLabels(), obj.GetAnnotations())
	}
}

func TestAdoptedObjectsStayWithoutOwnershipAnnotations(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*cluster, *unstructured.Unstructured){
		"all":     func(c *cluster, there *unstructured.Unstructured) { c.replace(configMaps, there) },
		"adopted": func(c *cluster, _ *unstructured.Unstructured) { c.deleteAdoptedAnnotation("there") },
		"invalid": func(c *cluster, _ *unstructured.Unstructured) { c.annotate("there", "maybe") },
	} {
		for name, after := range map[string]struct {
			converge bool // the ownership annotations are restored before the object is no longer wanted
			pruned   bool
		}{
			name + ", put back and withdrawn": {converge: true},
			name + ", put back and pruned":    {converge: true, pruned: true},
			name + ", withdrawn":              {},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newCluster(t)
				there := c.create(configMaps, c.configMap("there", "0"))
				b := c.bundle("one", c.configMap("there", "1"))
				converge(t, c.engine(nil), b)
				lose(c, there)
				if after.converge {
					wantChanges(t, converge(t, c.engine(nil), b).Changes, counts{bundle.Configured: 1})
				}
				if after.pruned {
					converge(t, c.engine(nil), c.bundle("one"))
				}
				withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
				if after.converge || c.get(configMaps, c.ns, "there") == nil {
					c.wantOrphaned("there")
				}
			})
		}
	}
}

func (c *cluster) annotate(name, adopted string) {
	c.t.Helper()
	c.patch(configMaps, name, `{"metadata":{"annotations":{"`+kube.AnnotationAdopted+`":"`+adopted+`"}}}`)
}

// TestAdoptionIsReadFromTheAnnotation uses a record of an earlier version, without the adoption.
func TestAdoptionIsReadFromTheAnnotation(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("there", "1"))
	converge(t, c.engine(nil), b)
	c.annotate("there", "true")
	converge(t, c.engine(nil), b)
	c.deleteAdoptedAnnotation("there")
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantOrphaned("there")
}

// TestAdoptionIsRecordedBeforeTheObjectIsApplied cuts the connection right after the apply request.
func TestAdoptionIsRecordedBeforeTheObjectIsApplied(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("there", "0"))
	b := c.bundle("one", c.configMap("there", "1"))
	applied := false
	cut := func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if applied {
				return nil, errCut
			}
			applied = r.Method == http.MethodPatch && strings.HasSuffix(r.URL.Path, "/there")
			return next.RoundTrip(r)
		})
	}
	cfg := rest.CopyConfig(c.cfg)
	cfg.Wrap(cut)
	e, err := engine.New(cfg, engine.Options{Namespace: c.records})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Converge(t.Context(), b); !errors.Is(err, errCut) {
		t.Fatalf("converge with the connection cut: got %v", err)
	}
	c.deleteAdoptedAnnotation("there")
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantOrphaned("there")
}

func TestObjectThatReplacesAnAdoptedObjectIsDeleted(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("there", "0"))
	b := c.bundle("one", c.configMap("there", "1"))
	converge(t, c.engine(nil), b)
	c.delete(configMaps, "there")
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	if got := c.get(configMaps, c.ns, "there"); got != nil {
		t.Errorf("the object created after the deletion of the adopted object: got %v, want none", got)
	}
}
