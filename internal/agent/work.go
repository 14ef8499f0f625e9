package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/kube/logkeys"
)

// removalPoll is the time between two looks at objects that were deleted and are not gone yet.
const removalPoll = time.Second

// inbox is what a worker needs of deliver.Inbox.
type inbox interface {
	Fetch(ctx context.Context, d deliver.Delivery) (bundle.Bundle, error)
	Report(ctx context.Context, d deliver.Delivery, report bundle.Report) error
	Find(id bundle.ID) (deliver.Delivery, bool)
	Wake(id bundle.ID)
}

// memory is the engine with its record of what is on the member.
type memory interface {
	deliver.Engine
	// Have says which bundle the record of id holds and how far it is; ok is false if there is no complete record.
	Have(ctx context.Context, id bundle.ID) (digest bundle.Digest, state bundle.State, ok bool, err error)
	// Resume converges id again from its record; ok is false if there is no complete one.
	Resume(ctx context.Context, id bundle.ID) (report bundle.Report, ok bool, err error)
	// Reports returns what the records say.
	Reports(ctx context.Context) ([]bundle.Report, error)
}

// worker does what deliveries ask for. Its inbox calls it for one delivery per ID at a time.
type worker struct {
	inbox  inbox
	engine memory
	gate   *gate
	// changedKinds is called after a pass that touched what kinds the member serves.
	changedKinds func()
	metrics      *metrics
}

// handle does what d asks for and reports it. An error means: again, later.
func (w *worker) handle(ctx context.Context, d deliver.Delivery) error {
	held, ok := w.gate.wait(ctx)
	if !ok {
		return ctx.Err()
	}
	if held {
		latest, ok := w.inbox.Find(d.ID)
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

func (w *worker) deploy(ctx context.Context, d deliver.Delivery) error {
	if answered, err := w.remember(ctx, d); answered || err != nil {
		return err
	}
	b, err := w.inbox.Fetch(ctx, d)
	switch {
	case errors.Is(err, deliver.ErrContentMissing):
		return w.inbox.Report(ctx, d, d.Missing(err.Error()))
	case errors.Is(err, deliver.ErrCorrupt), errors.Is(err, deliver.ErrUnsupported):
		return errors.Join(err, w.inbox.Report(ctx, d, failed(d, err)))
	case err != nil:
		return err
	}
	// Told only to be told: the outcome is reported in any case.
	if err := w.inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying}); err != nil {
		log.FromContext(ctx).Info("cannot report the start", logkeys.Bundle, d.ID.String(), logkeys.Reason, err.Error())
	}
	report, err := w.engine.Converge(ctx, b)
	return w.finish(ctx, d, report, err)
}

// remember answers d from the record on the member, if that holds what d asks for: nothing is transferred then.
func (w *worker) remember(ctx context.Context, d deliver.Delivery) (answered bool, err error) {
	digest, state, ok, err := w.engine.Have(ctx, d.ID)
	if err != nil {
		return false, fmt.Errorf("read the record of %s: %w", d.ID, err)
	}
	if !ok || digest != d.Digest || state == bundle.StateRemoving {
		return false, nil
	}
	if state != bundle.StateApplied {
		report, ok, err := w.engine.Resume(ctx, d.ID)
		if !ok {
			return false, err
		}
		return true, w.finish(ctx, d, report, err)
	}
	if d.Reported.State == bundle.StateApplied {
		return true, nil
	}
	reports, err := w.engine.Reports(ctx)
	if err != nil {
		return false, fmt.Errorf("read the record of %s: %w", d.ID, err)
	}
	for _, report := range reports {
		if report.ID == d.ID {
			return true, w.inbox.Report(ctx, d, report)
		}
	}
	return false, nil
}

// finish reports the outcome of a pass. err is the pass's own, and comes back for the pass to be tried again.
func (w *worker) finish(ctx context.Context, d deliver.Delivery, report bundle.Report, err error) error {
	w.metrics.converged(err)
	if touchesKinds(report.Changes) {
		w.changedKinds()
	}
	if err != nil && ctx.Err() != nil {
		return err
	}
	// Of a foreign hub the digest is a hash of its own making, which it wants to see again.
	report.ID, report.Digest = d.ID, d.Digest
	if err != nil && report.State != bundle.StateFailed {
		report = failed(d, err)
	}
	return errors.Join(err, w.inbox.Report(ctx, d, report))
}

func (w *worker) withdraw(ctx context.Context, d deliver.Delivery) error {
	if d.Reported.State == bundle.StateRemoved {
		return nil
	}
	done, err := w.engine.Withdraw(ctx, d.Withdrawal())
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		return errors.Join(err, w.inbox.Report(ctx, d, failed(d, err)))
	}
	if !done {
		// A worker that waited here would keep others from their deliveries.
		time.AfterFunc(removalPoll, func() { w.inbox.Wake(d.ID) })
		return w.inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoving})
	}
	w.changedKinds()
	return w.inbox.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoved})
}

func failed(d deliver.Delivery, err error) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateFailed, Message: err.Error()}
}

// touchesKinds says whether changes added or removed kinds that the member serves.
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
