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

// replace replaces an object by its manifest, as "kubectl replace" does: the UID stays, and the ownership annotations
// are deleted.
func (c *cluster) replace(gvr schema.GroupVersionResource, obj *unstructured.Unstructured) {
	c.t.Helper()
	obj = obj.DeepCopy()
	obj.SetUID("")
	obj.SetManagedFields(nil)
	obj.SetLabels(nil)
	obj.SetAnnotations(nil)
	obj.SetResourceVersion("")
	opts := metav1.UpdateOptions{FieldManager: "somebody"}
	if _, err := c.objects.Resource(gvr).Namespace(obj.GetNamespace()).Update(c.t.Context(), obj, opts); err != nil {
		c.t.Fatal(err)
	}
}

// dropAdoption deletes the annotation for adoption from an object, and no other ownership annotation.
func (c *cluster) dropAdoption(name string) {
	c.t.Helper()
	c.patch(configMaps, name, `{"metadata":{"annotations":{"`+kube.AnnotationAdopted+`":null}}}`)
}

func (c *cluster) wantLeft(name string) {
	c.t.Helper()
	obj := c.get(configMaps, c.ns, name)
	if obj == nil {
		c.t.Errorf("%s existed before, and was deleted", name)
	} else if len(obj.GetAnnotations()) > 0 || len(obj.GetLabels()) > 0 {
		c.t.Errorf("%s still has ownership annotations: %v %v", name, obj.GetLabels(), obj.GetAnnotations())
	}
}

func TestAdoptedObjectsSurviveTheLossOfTheirMarks(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*cluster, *unstructured.Unstructured){
		"all of them":     func(c *cluster, there *unstructured.Unstructured) { c.replace(configMaps, there) },
		"that one":        func(c *cluster, _ *unstructured.Unstructured) { c.dropAdoption("there") },
		"made unreadable": func(c *cluster, _ *unstructured.Unstructured) { c.annotate("there", "maybe") },
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
					c.wantLeft("there")
				}
			})
		}
	}
}

func (c *cluster) annotate(name, adopted string) {
	c.t.Helper()
	c.patch(configMaps, name, `{"metadata":{"annotations":{"`+kube.AnnotationAdopted+`":"`+adopted+`"}}}`)
}

// TestAdoptionIsReadFromTheAnnotation has a record without the adoption, as earlier versions wrote it.
func TestAdoptionIsReadFromTheAnnotation(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("there", "1"))
	converge(t, c.engine(nil), b)
	c.annotate("there", "true")
	converge(t, c.engine(nil), b)
	c.dropAdoption("there")
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantLeft("there")
}

// TestAdoptionIsRecordedBeforeTheObjectIsApplied cuts the line right after the apply request.
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
		t.Fatalf("converge with the line cut: got %v", err)
	}
	c.dropAdoption("there")
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantLeft("there")
}

func TestObjectMadeAfterAnAdoptedOneIsOurs(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("there", "0"))
	b := c.bundle("one", c.configMap("there", "1"))
	converge(t, c.engine(nil), b)
	c.delete(configMaps, "there")
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	if got := c.get(configMaps, c.ns, "there"); got != nil {
		t.Errorf("what was made in place of the adopted object: got %v, want it deleted", got)
	}
}
