package stories

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/towline/towline/internal/localkube"
)

// hookEvent is an event of a hook or an object of a chart.
type hookEvent struct {
	version  int64 // the resource version, which counts the writes of the whole cluster
	what     string
	name     string
	revision string // the value that the object was rendered with
	run      string // of a hook: release, revision and event
}

// hookLog lists the events of Jobs, Pods without an owner, ConfigMaps and Deployments of a namespace, in their order.
type hookLog struct {
	// mu guards events and ended.
	mu     sync.Mutex
	events []hookEvent
	ended  map[string]bool // by UID
}

// annotationRevision is on all objects of the hooks' chart.
const annotationRevision = "stories.towline.dev/revision"

// watchHooks starts a log of a namespace. The namespace may be created later.
func (w *world) watchHooks(plane *localkube.Plane, namespace string) *hookLog {
	w.t.Helper()
	c, err := dynamic.NewForConfig(plane.Config)
	if err != nil {
		w.t.Fatal(err)
	}
	l := &hookLog{ended: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	var readers sync.WaitGroup
	w.t.Cleanup(func() { cancel(); readers.Wait() })
	for _, gvr := range []schema.GroupVersionResource{
		{Group: "batch", Version: "v1", Resource: "jobs"}, {Version: "v1", Resource: "pods"},
		{Version: "v1", Resource: "configmaps"}, {Group: "apps", Version: "v1", Resource: "deployments"},
	} {
		list, err := c.Resource(gvr).Namespace(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		// The API server ends a slow watch, for example on a busy machine.
		events, err := watchtools.NewRetryWatcherWithContext(ctx, list.GetResourceVersion(), &cache.ListWatch{
			WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
				return c.Resource(gvr).Namespace(namespace).Watch(ctx, options)
			},
		})
		if err != nil {
			w.t.Fatal(err)
		}
		readers.Go(func() {
			for event := range events.ResultChan() {
				if obj, ok := event.Object.(*unstructured.Unstructured); ok {
					l.add(event.Type, obj)
				}
			}
		})
	}
	return l
}

func (l *hookLog) add(what watch.EventType, obj *unstructured.Unstructured) {
	if len(obj.GetOwnerReferences()) > 0 || obj.GetName() == rootCertificates {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	version, _ := strconv.ParseInt(obj.GetResourceVersion(), 10, 64) // etcd's revision
	event := hookEvent{version: version, name: obj.GetName(), revision: obj.GetAnnotations()[annotationRevision], run: obj.GetAnnotations()["towline.dev/hook-run"]}
	switch {
	case what == watch.Added:
		event.what = "created"
	case what == watch.Deleted:
		event.what = "deleted"
	case hasEnded(obj) && !l.ended[string(obj.GetUID())]:
		l.ended[string(obj.GetUID())] = true
		event.what = "ended"
	default:
		return
	}
	l.events = append(l.events, event)
}

// hasEnded returns whether a Job is complete, or a Pod has succeeded.
func hasEnded(obj *unstructured.Unstructured) bool {
	if obj.GetKind() == "Pod" {
		phase, _, _ := unstructured.NestedString(obj.Object, "status", "phase")
		return phase == string(corev1.PodSucceeded)
	}
	completed, _, _ := unstructured.NestedString(obj.Object, "status", "completionTime")
	return obj.GetKind() == "Job" && completed != ""
}

// list returns the events since a resource version, in order, as "created name".
func (l *hookLog) list(since int64) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.SortStableFunc(l.events, func(a, b hookEvent) int { return cmp.Compare(a.version, b.version) })
	var all []string
	for _, e := range l.events {
		if e.version > since {
			all = append(all, e.what+" "+e.name)
		}
	}
	return all
}

// last returns the resource version of the last event.
func (l *hookLog) last() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	var last int64
	for _, e := range l.events {
		last = max(last, e.version)
	}
	return last
}

// has returns whether an event was logged for a revision.
func (l *hookLog) has(what, name, revision string) bool { return l.count(what, name, revision) > 0 }

func (l *hookLog) count(what, name, revision string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, e := range l.events {
		if e.what == what && e.name == name && e.revision == revision {
			n++
		}
	}
	return n
}

// repeated lists the hooks that were created more than once for a revision of the release.
func (l *hookLog) repeated() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	times := map[string]int{}
	for _, e := range l.events {
		if e.what == "created" && strings.HasPrefix(e.name, "hook-") {
			times[e.name+" for "+e.run]++
		}
	}
	var all []string
	for name, n := range times {
		if n > 1 {
			all = append(all, fmt.Sprintf("%s: %d times", name, n))
		}
	}
	slices.Sort(all)
	return all
}
