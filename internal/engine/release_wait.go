package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	kstatus "github.com/fluxcd/cli-utils/pkg/kstatus/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

const (
	// minPollInterval and maxPollInterval limit the poll interval of a waiting release. Between them the interval is a
	// tenth of the time since the wait began.
	minPollInterval = 200 * time.Millisecond
	maxPollInterval = 2 * time.Second
)

// pendingWait is the condition that a release of a bundle waits for. The run has ended, so no key is locked.
type pendingWait struct {
	digest  bundle.Digest
	message string
	since   time.Time
	// isOver returns whether the release can continue: the condition is met, cannot be met any more, or timed out.
	isOver func(context.Context) bool
}

// waitList holds the pending wait of each bundle.
type waitList struct {
	mu    sync.Mutex // guards waits
	waits map[bundle.ID]*pendingWait
}

// set replaces the pending wait of a bundle. Nil deletes it.
func (l *waitList) set(id bundle.ID, w *pendingWait) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.waits == nil {
		l.waits = map[bundle.ID]*pendingWait{}
	}
	if w == nil {
		delete(l.waits, id)
		return
	}
	if before := l.waits[id]; before != nil && before.digest == w.digest && before.message == w.message {
		w.since = before.since
	}
	l.waits[id] = w
}

func (l *waitList) get(id bundle.ID) *pendingWait {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waits[id]
}

// isWaiting returns whether a release of the bundle still waits.
func (e *Engine) isWaiting(ctx context.Context, id bundle.ID, digest bundle.Digest) bool {
	w := e.waits.get(id)
	return w != nil && w.digest == digest && !w.isOver(ctx)
}

// pollPause returns the time until the next poll of a bundle's wait. ok is false if the bundle does not wait.
func (e *Engine) pollPause(id bundle.ID) (pause time.Duration, ok bool) {
	w := e.waits.get(id)
	if w == nil {
		return 0, false
	}
	return min(max(e.clock.Since(w.since)/10, minPollInterval), maxPollInterval), true
}

// checkReady returns whether the objects of a release are ready by the rules of kstatus. It sets a wait if they are
// not, and fails with a releaseError after the timeout. Without waitForJobs it ignores Jobs, without wait all other
// objects. A Job is ready when it is complete.
func (o *releaseOp) checkReady(ctx context.Context) (done bool, err error) {
	options := o.state.Options
	var entries []inventory.Entry
	for _, entry := range entriesOfRelease(o.inventory, o.state.Key()) {
		if isJob(entry.Ref) && !options.WaitForJobs || !isJob(entry.Ref) && !options.Wait {
			continue
		}
		entries = append(entries, entry)
	}
	slices.SortFunc(entries, func(a, b inventory.Entry) int { return kube.CompareRefs(a.Ref, b.Ref) }) // the message names the same object in each run
	entries, reason, err := o.engine.listUnready(ctx, entries)
	if err != nil || len(entries) == 0 {
		return err == nil, err
	}
	deadline := o.state.Changed.Add(options.TimeoutOrDefault())
	if !o.engine.now().Before(deadline) {
		return false, &releaseError{text: fmt.Sprintf("not ready within %s: %s", options.TimeoutOrDefault(), reason)}
	}
	engine := o.engine
	o.setWait("waiting for "+reason, func(ctx context.Context) bool {
		var err error
		entries, _, err = engine.listUnready(ctx, entries)
		return err != nil || len(entries) == 0 || !engine.now().Before(deadline)
	})
	return false, nil
}

func isJob(ref kube.Ref) bool { return ref.Group == "batch" && ref.Kind == "Job" }

// listUnready returns the entries of objects that are not ready, and the reason of the first one. It fails with a
// releaseError if a Job has failed.
func (e *Engine) listUnready(ctx context.Context, entries []inventory.Entry) (left []inventory.Entry, reason string, err error) {
	for _, entry := range entries {
		cause, err := e.unreadyReason(ctx, entry)
		if err != nil {
			return nil, "", err
		}
		if cause == "" {
			continue
		}
		if left = append(left, entry); reason == "" {
			reason = fmt.Sprintf("%s: %s", entry.Ref, cause)
		}
	}
	return left, reason, nil
}

// unreadyReason returns the reason why an object is not ready, or "" if it is ready.
func (e *Engine) unreadyReason(ctx context.Context, entry inventory.Entry) (string, error) {
	obj, ok, err := e.member.readObject(ctx, entry.Ref)
	if err != nil {
		return "", err
	}
	if !ok {
		return "it does not exist", nil
	}
	if isJob(entry.Ref) {
		result, message := jobResultOf(obj)
		if result == jobFailed {
			return "", &releaseError{text: fmt.Sprintf("%s failed: %s", entry.Ref, message)}
		}
		if result == jobRunning {
			return "it is not complete", nil
		}
		return "", nil
	}
	result, err := kstatus.Compute(obj)
	if err != nil {
		return "", &releaseError{text: fmt.Sprintf("%s has no readable status: %v", entry.Ref, err)}
	}
	if result.Status == kstatus.CurrentStatus || result.Status == kstatus.UnknownStatus {
		return "", nil
	}
	if result.Message == "" {
		return string(result.Status), nil
	}
	return result.Message, nil
}

// readObject reads a whole object from the API server. ok is false if it does not exist.
func (m *memberClient) readObject(ctx context.Context, ref kube.Ref) (obj *unstructured.Unstructured, ok bool, err error) {
	resource, err := m.mapper.ResourceInAnyVersion(ref.GVK())
	if meta.IsNoMatchError(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	obj, err = m.dynamicAt(resource, ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read %s: %w", ref, err)
	}
	return obj, true, nil
}

func (m *memberClient) dynamicAt(resource kube.Resource, namespace string) dynamic.ResourceInterface {
	if resource.Namespaced {
		return m.dynamicClient.Resource(resource.GVR).Namespace(namespace)
	}
	return m.dynamicClient.Resource(resource.GVR)
}
