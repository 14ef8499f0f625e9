package summaries_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

// work is the number of times that each part of the work for one profile was done.
type work struct{ Expansions, Decodings, Encodings, Compressions, Creations int }

// workCounter is a hub that counts the work of the deliveries to it. It keeps all results: as long as each is
// referenced, different results have different addresses.
type workCounter struct {
	acceptingHub

	mu         sync.Mutex // guards the fields below
	expansions int
	objects    map[*unstructured.Unstructured]bool
	documents  map[*byte]bool
	payloads   map[*byte]bool
	creations  int
}

func newWorkCounter() *workCounter {
	return &workCounter{
		acceptingHub: acceptingHub{contents: map[client.ObjectKey]*corev1.ConfigMap{}},
		objects:      map[*unstructured.Unstructured]bool{}, documents: map[*byte]bool{}, payloads: map[*byte]bool{},
	}
}

// Create counts the content that is stored.
func (c *workCounter) Create(_ context.Context, obj client.Object, _ ...client.CreateOption) error {
	content, isContent := obj.(*libv1beta1.ConfigurationBundle)
	if !isContent {
		return fmt.Errorf("unexpected type %T", obj)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.creations++
	c.payloads[&content.Spec.Payload[0]] = true
	return nil
}

// expand counts an expansion of a template: it returns the fields of a cluster.
func (c *workCounter) expand() (map[string]any, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.expansions++
	return map[string]any{}, nil
}

// add counts the objects of a bundle, and their JSON, that no earlier bundle had.
func (c *workCounter) add(b bundle.Bundle) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, item := range b.Items {
		documents, err := item.Documents.Encode(item.Objects)
		if err != nil {
			return err
		}
		for i, obj := range item.Objects {
			c.objects[obj], c.documents[&documents[i][0]] = true, true
		}
	}
	return nil
}

func (c *workCounter) work() work {
	c.mu.Lock()
	defer c.mu.Unlock()
	return work{Expansions: c.expansions, Decodings: len(c.objects), Encodings: len(c.documents), Compressions: len(c.payloads), Creations: c.creations}
}

// TestWorkForAProfileDoesNotGrowWithItsMembers delivers content of 20 objects that does not depend on the cluster, to
// many members at the same time. Content that only one member has is stored for each member, which shows how often
// content is compressed.
func TestWorkForAProfileDoesNotGrowWithItsMembers(t *testing.T) {
	t.Parallel()
	const members = 20
	for name, test := range map[string]struct {
		template string // in each object
		sharedBy int
		want     work
	}{
		"shared template":     {`{{ upper "text" }}`, members, work{Expansions: 1, Decodings: 20, Encodings: 20, Compressions: 1, Creations: 1}},
		"shared text":         {"", members, work{Decodings: 20, Encodings: 20, Compressions: 1, Creations: 1}},
		"content of a member": {`{{ upper "text" }}`, 1, work{Expansions: 1, Decodings: 20, Encodings: 20, Compressions: 1, Creations: members}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			counter := newWorkCounter()
			counter.addContent(0, test.template)
			d := newDeliverer(t, counter)
			var deliveries sync.WaitGroup
			for i := range members {
				deliveries.Go(func() {
					request := manifestsRequest(fmt.Sprintf("member-%d", i), "content-0")
					request.SharedBy, request.TemplateContext.Cluster = test.sharedBy, counter.expand
					delivered, err := d.deliver(t.Context(), request)
					if err == nil {
						err = counter.add(delivered)
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			deliveries.Wait()
			if diff := cmp.Diff(counter.work(), test.want); diff != "" {
				t.Errorf("work for %d members (-got +want):\n%s", members, diff)
			}
		})
	}
}
