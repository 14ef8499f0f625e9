package engine_test

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// createMany creates n ConfigMaps as another client. change changes each one.
func (c *cluster) createMany(n int, prefix string, change func(*unstructured.Unstructured)) {
	c.t.Helper()
	var work errgroup.Group
	work.SetLimit(16)
	for i := range n {
		work.Go(func() error {
			obj := c.configMap(fmt.Sprintf("%s-%04d", prefix, i), "0")
			change(obj)
			_, err := c.objects.Resource(configMaps).Namespace(c.ns).Create(c.t.Context(), obj, metav1.CreateOptions{FieldManager: "another"})
			return err
		})
	}
	if err := work.Wait(); err != nil {
		c.t.Fatal(err)
	}
}

func TestCrowdedNamespaceIsNotListed(t *testing.T) {
	t.Parallel()
	const others, wanted = 2000, 10
	for name, label := range map[string]string{"others' objects are not marked": "", "others' objects are marked": "Helm"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.createMany(others, "m-other", func(obj *unstructured.Unstructured) {
				if label != "" {
					obj.SetLabels(map[string]string{kube.LabelReason: label})
				}
			})
			var objects []*unstructured.Unstructured
			for i := range wanted {
				objects = append(objects, c.configMap(fmt.Sprintf("z-%d", i), "1"))
			}
			b := c.bundle("few", objects...)
			meter := &meter{}
			for _, pass := range []struct {
				name string
				want counts
			}{
				{"first", counts{bundle.Created: wanted}},
				{"unchanged", counts{bundle.Unchanged: wanted}},
			} {
				e := c.engine(meter)
				wantChanges(t, converge(t, e, b).Changes, pass.want)
				requests, size := meter.take(), meter.takeBytes()
				var reads int
				for _, line := range requests {
					if strings.HasPrefix(line, "GET") && strings.Contains(line, c.ns+"/configmaps") {
						reads++
					}
				}
				t.Logf("%s pass: %d requests, %d reads of objects, %d bytes", pass.name, len(requests), reads, size)
				// A list of all objects is more than 380 KB.
				if reads > wanted+2 || size > 200<<10 {
					t.Errorf("%s pass: got %d reads of objects and %d bytes:\n%s", pass.name, reads, size, strings.Join(requests, "\n"))
				}
			}
		})
	}
}
