package stories

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// changeCount counts the events of one object.
type changeCount struct{ Added, Modified, Deleted int }

// changeJournal counts the events of the ConfigMaps in one namespace.
type changeJournal struct {
	w         *world
	plane     *localkube.Plane
	namespace string
	marks     int

	// mu guards the fields below; changed is closed and replaced with every event.
	mu       sync.Mutex
	counters map[string]changeCount
	lost     error
	changed  chan struct{}
}

// startJournal starts to count the events in a namespace of a plane.
func (w *world) startJournal(plane *localkube.Plane, namespace string) *changeJournal {
	w.t.Helper()
	c, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		w.t.Fatal(err)
	}
	var before corev1.ConfigMapList
	if err := c.List(w.t.Context(), &before, client.InNamespace(namespace)); err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	events, err := c.Watch(ctx, &corev1.ConfigMapList{}, client.InNamespace(namespace), &client.ListOptions{
		Raw: &metav1.ListOptions{ResourceVersion: before.ResourceVersion},
	})
	if err != nil {
		cancel()
		w.t.Fatal(err)
	}
	j := &changeJournal{w: w, plane: plane, namespace: namespace, counters: map[string]changeCount{}, changed: make(chan struct{})}
	var reader sync.WaitGroup
	reader.Go(func() { j.read(events.ResultChan()) })
	w.t.Cleanup(func() {
		cancel()
		events.Stop()
		reader.Wait()
	})
	return j
}

func (j *changeJournal) read(events <-chan watch.Event) {
	for event := range events {
		j.note(event)
	}
}

func (j *changeJournal) note(event watch.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	object, ok := event.Object.(*corev1.ConfigMap)
	if !ok {
		j.lost = fmt.Errorf("the watch of %s returned event %s: %v", j.namespace, event.Type, event.Object)
		return
	}
	if object.Name == rootCertificates {
		return
	}
	t := j.counters[object.Name]
	switch event.Type {
	case watch.Added:
		t.Added++
	case watch.Modified:
		t.Modified++
	case watch.Deleted:
		t.Deleted++
	}
	j.counters[object.Name] = t
	close(j.changed)
	j.changed = make(chan struct{})
}

// rootCertificates is the ConfigMap that Kubernetes creates in every namespace.
const rootCertificates = "kube-root-ca.crt"

// nextPage returns the events since the last page, including all events before the call.
func (j *changeJournal) nextPage() map[string]changeCount {
	j.w.t.Helper()
	j.marks++
	mark := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: j.namespace, Name: fmt.Sprintf("bookmark-%d", j.marks)}}
	if err := j.w.client(j.plane).Create(j.w.t.Context(), mark); err != nil {
		j.w.t.Fatal(err)
	}
	deadline := time.After(waitTimeout)
	for {
		page, next, err := j.pageUntil(mark.Name)
		if err != nil {
			j.w.t.Fatal(err)
		}
		if page != nil {
			return page
		}
		select {
		case <-next:
		case <-deadline:
			j.w.t.Fatalf("the watch of %s did not return %s within %s", j.namespace, mark.Name, waitTimeout)
		}
	}
}

// pageUntil returns the page that ends with mark, or a channel that is closed with the next event if the watch has not
// returned mark yet.
func (j *changeJournal) pageUntil(mark string) (page map[string]changeCount, next <-chan struct{}, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.lost != nil {
		return nil, nil, j.lost
	}
	if _, ok := j.counters[mark]; !ok {
		return nil, j.changed, nil
	}
	page = maps.Clone(j.counters)
	delete(page, mark)
	j.counters = map[string]changeCount{}
	return page, nil, nil
}

// wantChanges compares the next page.
func (j *changeJournal) wantChanges(what string, want map[string]changeCount) {
	j.w.t.Helper()
	if diff := cmp.Diff(want, j.nextPage()); diff != "" {
		j.w.t.Errorf("%s: events of the objects (-want +got):\n%s", what, diff)
	}
}

// configMaps returns the ConfigMaps of a namespace that Towline applied, by name.
func (w *world) configMaps(plane *localkube.Plane, namespace string) map[string]corev1.ConfigMap {
	w.t.Helper()
	var list corev1.ConfigMapList
	if err := w.client(plane).List(w.t.Context(), &list, client.InNamespace(namespace)); err != nil {
		w.t.Fatal(err)
	}
	found := map[string]corev1.ConfigMap{}
	for _, item := range list.Items {
		if _, ours := item.Annotations[kube.AnnotationRequestor]; ours {
			found[item.Name] = item
		}
	}
	return found
}
