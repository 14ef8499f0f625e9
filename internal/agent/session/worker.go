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

const (
	// corruptRetryInterval is the time until content that does not match its hashes is fetched again. It is long, because
	// the hub writes such content again only after a user has deleted it.
	corruptRetryInterval = 5 * time.Minute
	// startReportDelay is the time after which a bundle without Helm releases is reported as being applied. Most bundles
	// are applied sooner, and only their result is reported.
	startReportDelay = 2 * time.Second
)

// Source is the part of *deliver.AgentSource that a Worker uses.
type Source interface {
	Fetch(ctx context.Context, d deliver.Delivery) (bundle.Bundle, error)
	Report(ctx context.Context, d deliver.Delivery, report bundle.Report) error
	ReportStart(ctx context.Context, d deliver.Delivery) error
	Find(id bundle.ID) (deliver.Delivery, bool)
	Wake(id bundle.ID)
}

// Engine is the part of *engine.Engine that a Worker uses.
type Engine interface {
	deliver.Engine
	// CompareRenderings compares the revisions that the releases of b are rendered for with the release records on the
	// member. It changes nothing. If the report has Outdated releases, the caller must not call Converge.
	CompareRenderings(ctx context.Context, b bundle.Bundle) (bundle.Report, error)
	// RecordedDigest reads the digest and state in the inventory of id; ok is false if there is no complete inventory.
	RecordedDigest(ctx context.Context, id bundle.ID) (digest bundle.Digest, state bundle.State, ok bool, err error)
	// CachedDigest returns the digest in the cached inventory of id, without a request; ok is false if none is cached.
	CachedDigest(id bundle.ID) (digest bundle.Digest, ok bool)
	// Failure returns the report of the last run of a bundle if it failed and the Worker must not repeat it.
	Failure(id bundle.ID, digest bundle.Digest) (report bundle.Report, ok bool)
	// ListCachedDeployed lists the cached inventories without a request; ok is false until they were read.
	ListCachedDeployed() (all []bundle.Deployed, ok bool)
}

// Worker handles deliveries. Its Source calls Handle for one delivery per ID at a time. All exported fields are
// required.
type Worker struct {
	Source Source
	Engine Engine
	// Gate is closed while deliveries must wait.
	Gate *Gate
	// OnKindsChanged is called after the kinds that the member serves may have changed.
	OnKindsChanged func()
	// OnConverged is called with the result of each attempt to apply a bundle. It is not called if the agent applies
	// nothing because the hub must render Outdated releases again.
	OnConverged func(error)
	// OnWithdrawn is called after a bundle was removed and before the removal is reported. The agent then updates
	// kube.AnnotationUnrequested of its Lease.
	OnWithdrawn func()

	// mu guards the fields below.
	mu sync.Mutex
	// olderDigests has the digests of bundles that the hub requests although the member has newer versions: the hub was
	// restored from a backup. They are lost when the agent restarts.
	olderDigests map[bundle.ID]bundle.Digest
	// wakeScheduled has the bundles that wakeLater will wake.
	wakeScheduled map[bundle.ID]bool
}

// Handle applies or removes the bundle of d and reports the result. After an error the caller must retry later. It
// reports a failure and returns nil if the Engine itself retries it (Engine.Failure), or if only another bundle can
// succeed (bundle.TerminalError).
func (w *Worker) Handle(ctx context.Context, d deliver.Delivery) error {
	hasWaited, ok := w.Gate.WaitOpen(ctx)
	if !ok {
		return ctx.Err()
	}
	if hasWaited { // the delivery may have changed meanwhile
		latest, ok := w.Source.Find(d.ID)
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
	if isReported, err := w.reportIfDeployed(ctx, d); isReported || err != nil {
		return err
	}
	b, err := w.Source.Fetch(ctx, d)
	b.KeepObjects = w.isOlder(d)
	switch {
	case errors.Is(err, deliver.ErrContentMissing):
		return w.Source.Report(ctx, d, d.MissingReport(err.Error()))
	case errors.Is(err, deliver.ErrCorrupt), errors.Is(err, deliver.ErrUnsupported):
		log.FromContext(ctx).Error(err, "read the content of the bundle", logkeys.Bundle, d.ID.String())
		if errors.Is(err, deliver.ErrCorrupt) {
			w.wakeLater(d.ID)
		}
		return w.Source.Report(ctx, d, failedReport(d, err))
	case err != nil:
		return err
	}
	report, err := w.Engine.CompareRenderings(ctx, b)
	if err != nil || len(report.Outdated) > 0 {
		return w.reportResult(ctx, d, report, err)
	}
	report, err = w.converge(ctx, d, b)
	if errors.Is(err, deliver.ErrReplaced) {
		return nil // the new delivery follows
	}
	if errors.Is(err, errStartNotReported) {
		return err
	}
	if err == nil {
		w.mu.Lock()
		delete(w.olderDigests, d.ID)
		w.mu.Unlock()
	}
	return w.reportResult(ctx, d, report, err)
}

// wakeLater schedules a wake of the delivery of id after corruptRetryInterval, unless one is scheduled.
func (w *Worker) wakeLater(id bundle.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wakeScheduled[id] {
		return
	}
	if w.wakeScheduled == nil {
		w.wakeScheduled = map[bundle.ID]bool{}
	}
	w.wakeScheduled[id] = true
	time.AfterFunc(corruptRetryInterval, func() {
		w.mu.Lock()
		delete(w.wakeScheduled, id)
		w.mu.Unlock()
		w.Source.Wake(id)
	})
}

// errStartNotReported is the error of converge if nothing was applied, since the start could not be reported.
var errStartNotReported = errors.New("the start is not reported")

// converge applies b and reports the start: before the first change if b has Helm releases, otherwise after
// startReportDelay. It fails with deliver.ErrReplaced or errStartNotReported if nothing was applied.
func (w *Worker) converge(ctx context.Context, d deliver.Delivery, b bundle.Bundle) (bundle.Report, error) {
	if slices.ContainsFunc(b.Items, func(item bundle.Item) bool { return item.Release != nil }) {
		// After the report the hub keeps this rendering, so that the agent can continue with it after a restart. Without it
		// the hub could replace the rendering in the middle of a revision.
		if err := w.Source.ReportStart(ctx, d); err != nil {
			return bundle.Report{}, fmt.Errorf("%w: %w", errStartNotReported, err)
		}
		return w.Engine.Converge(ctx, b)
	}
	applied, reported := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(reported)
		select {
		case <-applied:
		case <-ctx.Done():
		case <-time.After(startReportDelay):
			// The result is reported in any case, so an error needs no retry.
			_ = w.Source.ReportStart(ctx, d)
		}
	}()
	report, err := w.Engine.Converge(ctx, b)
	close(applied)
	<-reported // the report of the start must not replace the result
	return report, err
}

// reportIfDeployed reports the state in the inventory if the member has the bundle of d already, so that no content is
// transferred. If the bundle is not completely applied, the Engine itself completes it and then wakes the delivery. It
// also reports a failure that must not be repeated.
func (w *Worker) reportIfDeployed(ctx context.Context, d deliver.Delivery) (isReported bool, err error) {
	if report, ok := w.Engine.Failure(d.ID, d.Digest); ok {
		return true, w.Source.Report(ctx, d, report)
	}
	if w.isNewBundle(d) {
		return false, nil // no need to read the inventory here: Converge reads it
	}
	digest, state, ok, err := w.Engine.RecordedDigest(ctx, d.ID)
	if err != nil {
		return false, fmt.Errorf("read the inventory of %s: %w", d.ID, err)
	}
	// The hub has a report that the member has applied this bundle, but the member has applied another one since then.
	if ok && digest != d.Digest && state == bundle.StateApplied && d.Reported.State == bundle.StateApplied && d.Reported.Digest == d.Digest {
		w.recordOlder(ctx, d)
	}
	if !ok || digest != d.Digest || state == bundle.StateRemoving {
		return false, nil
	}
	deployed, ok, err := w.Engine.FindDeployed(ctx, d.ID)
	if err != nil || !ok {
		return false, err
	}
	return true, w.Source.Report(ctx, d, deployed.Report)
}

// isNewBundle returns whether the member is known to lack the bundle of d: the cached inventory and the report on the
// hub are for other digests.
func (w *Worker) isNewBundle(d deliver.Delivery) bool {
	cached, ok := w.Engine.CachedDigest(d.ID)
	return ok && cached != d.Digest && d.Reported.Digest != d.Digest
}

// recordOlder records that the hub requests an older bundle, because the hub was restored from a backup.
func (w *Worker) recordOlder(ctx context.Context, d deliver.Delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.olderDigests == nil {
		w.olderDigests = map[bundle.ID]bundle.Digest{}
	}
	if w.olderDigests[d.ID] != d.Digest {
		log.FromContext(ctx).Info("the hub requests an older version than the deployed one; objects that it lacks are kept", logkeys.Bundle, d.ID.String())
	}
	w.olderDigests[d.ID] = d.Digest
}

// isOlder returns true if recordOlder recorded the bundle of d.
func (w *Worker) isOlder(d deliver.Delivery) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.olderDigests[d.ID] != (bundle.Digest{}) && w.olderDigests[d.ID] == d.Digest
}

// reportResult reports the result of an attempt, and its error err. It returns err, so that the caller retries, unless
// err is a bundle.TerminalError, after which a retry cannot succeed.
func (w *Worker) reportResult(ctx context.Context, d deliver.Delivery, report bundle.Report, err error) error {
	if err != nil || len(report.Outdated) == 0 {
		w.OnConverged(err)
	}
	if changesKinds(report.Changes) {
		w.OnKindsChanged()
	}
	if err != nil && ctx.Err() != nil {
		return err
	}
	// A hub of Sveltos computes its digests in another way, and expects the requested one back.
	report.ID, report.Digest = d.ID, d.Digest
	if err != nil && report.State != bundle.StateFailed {
		report = failedReport(d, err)
	}
	if _, isTerminal := errors.AsType[*bundle.TerminalError](err); isTerminal {
		err = nil
	}
	return errors.Join(err, w.Source.Report(ctx, d, report))
}

func (w *Worker) withdraw(ctx context.Context, d deliver.Delivery) error {
	if d.Reported.State == bundle.StateRemoved {
		// Another client may have written StateRemoved although the bundle is deployed.
		if _, deployed, err := w.Engine.FindDeployed(ctx, d.ID); err != nil || !deployed {
			return err
		}
	}
	done, err := w.Engine.Withdraw(ctx, d.Withdrawal())
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		return errors.Join(err, w.Source.Report(ctx, d, failedReport(d, err)))
	}
	if !done {
		return w.Source.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoving})
	}
	w.OnKindsChanged()
	w.OnWithdrawn()
	return w.Source.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateRemoved})
}

// UnrequestedValue returns the value of kube.AnnotationUnrequested: the bundles of profiles on the member that have no
// group on the hub. known is false until the groups and the inventories were listed.
func UnrequestedValue(engine Engine, source *deliver.AgentSource) (value string, known bool) {
	if engine == nil || source == nil {
		return "", false
	}
	deployed, ok := engine.ListCachedDeployed()
	if !ok {
		return "", false
	}
	return source.Unrequested(slices.DeleteFunc(deployed, func(d bundle.Deployed) bool { return d.ID.RequestorKind != configv1beta1.ClusterSummaryKind }))
}

// NullIfEmpty returns value for a merge patch: nil, which removes the field, for "".
func NullIfEmpty(value string) any {
	if value == "" {
		return nil
	}
	return value
}

func failedReport(d deliver.Delivery, err error) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateFailed, Message: err.Error()}
}

// changesKinds returns true if changes may have added or removed kinds that the member serves.
func changesKinds(changes bundle.ChangeSet) bool {
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
