package session

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/kube/logkeys"
)

// removalPoll is the time between two looks at objects that were deleted and are not gone yet.
const removalPoll = time.Second

// Inbox is what a Worker needs of deliver.AgentSource.
type Inbox interface {
	Fetch(ctx context.Context, d deliver.Delivery) (bundle.Bundle, error)
	Report(ctx context.Context, d deliver.Delivery, report bundle.Report) error
	Find(id bundle.ID) (deliver.Delivery, bool)
	Wake(id bundle.ID)
}

// Memory is the engine with its record of what is on the member.
type Memory interface {
	deliver.Inventory
	// Have says which bundle the record of id holds and how far it is; ok is false if there is no complete record.
	Have(ctx context.Context, id bundle.ID) (digest bundle.Digest, state bundle.State, ok bool, err error)
	// Resume converges id again from its record; ok is false if there is no complete one.
	Resume(ctx context.Context, id bundle.ID) (report bundle.Report, ok bool, err error)
	// KnownDeployed lists the cached records, without a request; ok is false until they have been read.
	KnownDeployed() (all []bundle.Deployed, ok bool)
}

// Worker does what deliveries ask for. Its inbox calls it for one delivery per ID at a time.
type Worker struct {
	Inbox  Inbox
	Engine Memory
	// Gate is closed while nothing is to be done.
	Gate *Gate
	// ChangedKinds is called after a pass that touched what kinds the member serves.
	ChangedKinds func()
	// Converged is told how each pass ended.
	Converged func(error)
	// Withdrew is called when a bundle was withdrawn, before that is reported: the Lease may list it.
	Withdrew func()

	// mu guards older: the digests of bundles that the hub asks for although the member holds another one that it reported as applied after it.
	// An agent that is started again before such a bundle arrives has forgotten that.
	mu    sync.Mutex
	older map[bundle.ID]bundle.Digest
}

// Handle does what d asks for and reports it. An error means: again, later.
func (w *Worker) Handle(ctx context.Context, d deliver.Delivery) error {
	held, ok := w.Gate.Wait(ctx)
	if !ok {
		return ctx.Err()
	}
	if held {
		latest, ok := w.Inbox.Find(d.ID)
		if !ok {
			return nil
		}
		d = latest
	}
	if d.Remove {
		return w.withdraw(ctx, d)
	}
	return w.deploy(ctx, d)
}

func (w *Worker) deploy(ctx context.Context, d deliver.Delivery) error {
	if answered, err := w.remember(ctx, d); answered || err != nil {
		return err
	}
	b, err := w.Inbox.Fetch(ctx, d)
	b.KeepObjects = w.isOlder(d)
	switch {
	case errors.Is(err, deliver.ErrContentMissing):
		return w.Inbox.Report(ctx, d, d.MissingReport(err.Error()))
	case errors.Is(err, deliver.ErrCorrupt), errors.Is(err, deliver.ErrUnsupported):
		return errors.Join(err, w.Inbox.Report(ctx, d, failed(d, err)))
	case err != nil:
		return err
	}
	// Told only to be told: the outcome is reported in any case.
	if err := w.Inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying}); err != nil {
		log.FromContext(ctx).Info("cannot report the start", logkeys.Bundle, d.ID.String(), logkeys.Reason, err.Error())
	}
	report, err := w.Engine.Converge(ctx, b)
	if err == nil {
		w.mu.Lock()
		delete(w.older, d.ID)
		w.mu.Unlock()
	}
	return w.finish(ctx, d, report, err)
}

// remember answers d from the record on the member, if that holds what d asks for: nothing is transferred then.
func (w *Worker) remember(ctx context.Context, d deliver.Delivery) (answered bool, err error) {
	digest, state, ok, err := w.Engine.Have(ctx, d.ID)
	if err != nil {
		return false, fmt.Errorf("read the record of %s: %w", d.ID, err)
	}
	if ok && digest != d.Digest && state == bundle.StateApplied && d.Reported.State == bundle.StateApplied && d.Reported.Digest == d.Digest {
		w.noteOlder(ctx, d)
	}
	if !ok || digest != d.Digest || state == bundle.StateRemoving {
		return false, nil
	}
	if state != bundle.StateApplied {
		report, ok, err := w.Engine.Resume(ctx, d.ID)
		if !ok {
			return false, err
		}
		return true, w.finish(ctx, d, report, err)
	}
	deployed, ok, err := w.Engine.FindDeployed(ctx, d.ID)
	if err != nil || !ok {
		return false, err
	}
	return true, w.Inbox.Report(ctx, d, deployed.Report)
}

// noteOlder records that the hub has an older bundle as applied, because it was restored from a backup.
func (w *Worker) noteOlder(ctx context.Context, d deliver.Delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.older == nil {
		w.older = map[bundle.ID]bundle.Digest{}
	}
	if w.older[d.ID] != d.Digest {
		log.FromContext(ctx).Info("the hub asks for an older version than the one deployed; objects that it lacks are kept", logkeys.Bundle, d.ID.String())
	}
	w.older[d.ID] = d.Digest
}

// isOlder reports whether noteOlder recorded the bundle of d.
func (w *Worker) isOlder(d deliver.Delivery) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.older[d.ID] != (bundle.Digest{}) && w.older[d.ID] == d.Digest
}

// finish reports the outcome of a pass. err is the pass's own, and comes back for the pass to be tried again.
func (w *Worker) finish(ctx context.Context, d deliver.Delivery, report bundle.Report, err error) error {
	w.Converged(err)
	if touchesKinds(report.Changes) {
		w.ChangedKinds()
	}
	if err != nil && ctx.Err() != nil {
		return err
	}
	// Of a foreign hub the digest is a hash of its own making, which it wants to see again.
	report.ID, report.Digest = d.ID, d.Digest
	if err != nil && report.State != bundle.StateFailed {
		report = failed(d, err)
	}
	return errors.Join(err, w.Inbox.Report(ctx, d, report))
}

func (w *Worker) withdraw(ctx context.Context, d deliver.Delivery) error {
	if d.Reported.State == bundle.StateRemoved {
		// The report is output: somebody else may have written it.
		if _, deployed, err := w.Engine.FindDeployed(ctx, d.ID); err != nil || !deployed {
			return err
		}
	}
	done, err := w.Engine.Withdraw(ctx, d.Withdrawal())
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		return errors.Join(err, w.Inbox.Report(ctx, d, failed(d, err)))
	}
	if !done {
		// A worker that waited here would keep others from their deliveries.
		time.AfterFunc(removalPoll, func() { w.Inbox.Wake(d.ID) })
		return w.Inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoving})
	}
	w.ChangedKinds()
	w.Withdrew()
	return w.Inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoved})
}

// Unrequested returns the value of kube.AnnotationUnrequested for the bundles of profiles. known is false until the
// groups on the hub and the records on the member have been listed.
func Unrequested(engine Memory, inbox *deliver.AgentSource) (value string, known bool) {
	if engine == nil || inbox == nil {
		return "", false
	}
	deployed, ok := engine.KnownDeployed()
	if !ok {
		return "", false
	}
	return inbox.Unrequested(slices.DeleteFunc(deployed, func(d bundle.Deployed) bool { return d.ID.RequestorKind != configv1beta1.ClusterSummaryKind }))
}

// OrNull returns value as a merge patch takes it: null, which removes the field, for "".
func OrNull(value string) any {
	if value == "" {
		return nil
	}
	return value
}

func failed(d deliver.Delivery, err error) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateFailed, Message: err.Error()}
}

// touchesKinds returns whether changes added or removed kinds that the member serves.
func touchesKinds(changes bundle.ChangeSet) bool {
	for _, change := range changes {
		if change.Action == bundle.Unchanged || change.Action == bundle.Failed || change.Action == bundle.Skipped {
			continue
		}
		if change.Ref.Kind == "CustomResourceDefinition" || change.Ref.Kind == "APIService" {
			return true
		}
	}
	return false
}
