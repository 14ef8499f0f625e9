package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/dynamic"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// Options change how an Engine works. The zero Options are fine.
type Options struct {
	// Namespace has the Secrets of the records. The engine creates it with the first record. Default: kube.AgentNamespace.
	Namespace string
	// OnCorrect is called after Run has changed objects, with the changes. It must not block for long.
	OnCorrect func(bundle.ID, bundle.ChangeSet)
	// OnReport is called when the report of a bundle changes without a call of Converge. It is also called when the caller
	// must call Converge or Withdraw again: the record of the bundle no longer exists, or a withdrawal is complete or
	// begins to fail. It may block, but not longer than Run's context.
	OnReport func(bundle.ID)
	// Scope is the UID of the object that declares the cluster on the hub (inventory.OwnerScope.Registration). Hub is the
	// UID of the hub. Both are empty for a SveltosCluster. Engines of different scopes can work on one cluster: they do
	// not see each other's inventories. An Engine never changes objects of another hub. A delivery takes over objects of
	// another scope of the same hub.
	Scope string
	Hub   string
	// Partitions divide the bundles among several processes. Nil: this Engine has all bundles of its scope. Otherwise the
	// caller must call Serve before other methods for a bundle.
	Partitions *inventory.Partitions
	// RecordMemory limits the memory of the records that are cached or decoded, and of the release records in use. Nil is
	// no limit.
	RecordMemory *kube.Reservation
	// OnChange is called, while Run runs, for a bundle with the option CorrectDrift when the status of its objects
	// changes, or when this Engine changes them. A bundle has at most one call in some seconds; the deletion of an object
	// is reported at once. It may block, but not longer than Run's context.
	OnChange func(bundle.ID)
	// RequestTimeout limits each request to the cluster, except watches. Default: one minute.
	RequestTimeout time.Duration
	// Clock has the time of reports, retries and drift correction. Default: the real clock.
	Clock clock.WithTicker
}

// Engine makes one cluster equal its bundles. It stores its state on that cluster, in one inventory record per bundle.
// So it can be killed at any moment, and another Engine continues. Only one Engine at a time may work for a scope of a
// cluster, or for a partition of that scope.
type Engine struct {
	member *memberClient
	store  *inventory.Store
	clock  clock.WithTicker
	// onCorrect, onReport and onChange are functions of Options.
	onCorrect  func(bundle.ID, bundle.ChangeSet)
	onReport   func(bundle.ID)
	onChange   func(bundle.ID)
	ownerScope inventory.OwnerScope
	// recordMemory is Options.RecordMemory.
	recordMemory *kube.Reservation
	observed     *observedStates
	// running is true while Run runs. Then Run repeats failed runs, and the caller must not.
	running     atomic.Bool
	failedRuns  failedRuns
	lostBundles lostBundles

	// A run or withdrawal locks its bundle, and then all its objects, until it ends. So bundles with the same object see
	// each other's ownership labels.
	bundleLocks *keyLock[bundle.ID]
	objectLocks *keyLock[kube.Ref]
	// waits has the conditions that Helm releases wait for.
	waits waitList
	// scopeConfirmed is closed by confirmScope when the hub has confirmed that ownerScope belongs to this cluster.
	scopeConfirmed chan struct{}
	confirmScope   func()
}

// New returns an Engine for the cluster of cfg. The limits of cfg on requests per second hold for all its requests
// together. It does not connect yet. It fails if cfg cannot be used.
func New(cfg *rest.Config, opts Options) (*Engine, error) {
	if opts.Namespace == "" {
		opts.Namespace = kube.AgentNamespace
	}
	if opts.Clock == nil {
		opts.Clock = clock.RealClock{}
	}
	if opts.OnCorrect == nil {
		opts.OnCorrect = func(bundle.ID, bundle.ChangeSet) {}
	}
	if opts.OnReport == nil {
		opts.OnReport = func(bundle.ID) {}
	}
	if opts.OnChange == nil {
		opts.OnChange = func(bundle.ID) {}
	}
	cfg = rest.CopyConfig(cfg)
	if cfg.RateLimiter == nil && cfg.QPS > 0 {
		cfg.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cfg.QPS, max(cfg.Burst, 1))
	}
	if cfg.UserAgent == "" {
		cfg.UserAgent = "towline-engine"
	}
	cfg.Wrap(newImpersonator)
	cfg.Wrap(limitRequests(cmp.Or(opts.RequestTimeout, defaultRequestTimeout)))
	member, core, err := newMemberClient(cfg)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		member: member, clock: opts.Clock, onCorrect: opts.OnCorrect, onReport: opts.OnReport, onChange: opts.OnChange, ownerScope: inventory.OwnerScope{Hub: opts.Hub, Registration: opts.Scope},
		recordMemory: opts.RecordMemory,
		bundleLocks:  newKeyLock[bundle.ID](), objectLocks: newKeyLock[kube.Ref](),
		scopeConfirmed: make(chan struct{}), observed: &observedStates{byID: map[bundle.ID]map[kube.Ref]observedState{}},
	}
	e.confirmScope = sync.OnceFunc(func() { close(e.scopeConfirmed) })
	e.store = inventory.NewPartitionedStore(core, member.metadataClient, opts.Namespace, e.ownerScope, opts.Partitions)
	e.store.LimitMemory(opts.RecordMemory)
	return e, nil
}

// newMemberClient returns the clients for the cluster of cfg, which share one HTTP client. It sends no request.
func newMemberClient(cfg *rest.Config) (*memberClient, corev1client.CoreV1Interface, error) {
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("make a client of the member: %w", err)
	}
	metadataClient, err := metadata.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a metadata client of the member: %w", err)
	}
	dynamicClient, err := dynamic.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a dynamic client of the member: %w", err)
	}
	discoveryClient, err := kube.NewDiscovery(cfg, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a discovery client of the member: %w", err)
	}
	binary := rest.CopyConfig(cfg)
	binary.ContentType = "application/vnd.kubernetes.protobuf"
	binary.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	core, err := corev1client.NewForConfigAndClient(binary, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a core client of the member: %w", err)
	}
	return &memberClient{
		metadataClient: metadataClient, dynamicClient: dynamicClient, core: core, namespaces: core.Namespaces(),
		restClient: discoveryClient.RESTClient(), discoveryClient: discoveryClient, mapper: kube.NewMapper(discoveryClient),
	}, core, nil
}

// Converge makes the cluster equal b: it applies new and changed objects, and prunes objects that b lacks. It rebuilds
// a lost inventory from the objects with our ownership labels. The error is nil if the report's state is Applied, or
// Applying while a Helm release waits. After an error the next call continues from the inventory. The error wraps
// ErrConflict if an object belongs to another profile. It wraps bundle.TerminalError if Run repeats the failed run, or
// if only another bundle can succeed: further calls then return the same result without a request, until Run has
// succeeded or b changes. Without the option CorrectDrift, an applied bundle is not read again until it changes. The
// revisions of the releases in report.Outdated have not begun, see CompareRenderings.
func (e *Engine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	p, unlock, err := e.newRun(ctx, b)
	if err != nil {
		return failedReport(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	defer unlock()
	if run := e.findFailedRun(b.ID, p.digest); run != nil {
		return run.report, e.asTerminal(run.err)
	}
	if err := p.load(ctx); err != nil {
		return failedReport(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	prior := p.prior
	if !b.Options.CorrectDrift && prior.State == bundle.StateApplied && prior.BundleDigest() == p.digest {
		return prior.Report(), nil
	}
	if prior.BundleDigest() == p.digest && prior.State == bundle.StateApplying && e.isWaiting(ctx, b.ID, p.digest) {
		return prior.Report(), nil
	}
	if prior.BundleDigest() != p.digest {
		p.trigger = triggerDelivery
	}
	report, err := p.run(ctx)
	if err == nil {
		e.lostBundles.remove(b.ID)
	}
	return report, err
}

// newRun locks the ID of b and returns a run that has not begun; p is not nil with an error. The caller must call load
// before run, and unlock at the end.
func (e *Engine) newRun(ctx context.Context, b bundle.Bundle) (p *applyRun, unlock func(), err error) {
	p = &applyRun{engine: e, bundle: b}
	if p.digest, err = b.Digest(); err != nil {
		return p, nil, err
	}
	unlock, err = e.bundleLocks.acquire(ctx, b.ID)
	return p, unlock, err
}

// load reads the record of the bundle into prior. It sets inventoryLost if the record is incomplete. If only its
// content is incomplete, prior has no content and no digest, so that the run stores them again.
func (p *applyRun) load(ctx context.Context) (err error) {
	store := p.engine.store
	if p.prior, err = store.Load(ctx, p.bundle.ID); errors.Is(err, inventory.ErrIncomplete) {
		p.inventoryLost, err = true, nil
	}
	if err != nil {
		return err
	}
	intact, err := store.IsComplete(ctx, p.prior)
	if err == nil && !intact {
		p.prior = p.prior.WithoutContent()
	}
	return err
}

// resume runs a bundle with the content in the record of id. It converges the objects in only, or all objects if only
// is nil or the bundle is being applied. It does not change a suspended bundle. With a nil error, ok is false if the
// content must be delivered again: there is no complete record, or the bundle is being withdrawn. The caller must hold
// the lock of id.
func (e *Engine) resume(ctx context.Context, id bundle.ID, only map[kube.Ref]bool) (report bundle.Report, ok bool, err error) {
	prior, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) || (err == nil && (!prior.Exists() || prior.State == bundle.StateRemoving)) {
		return bundle.Report{ID: id}, false, nil
	}
	if err != nil {
		e.failedRuns.postpone(id, e.clock.Now())
		return bundle.Report{ID: id}, false, err
	}
	if prior.Suspended || (len(only) == 0 && prior.State == bundle.StateApplying && e.isWaiting(ctx, id, prior.BundleDigest())) {
		return prior.Report(), true, nil
	}
	b, err := e.store.Bundle(ctx, prior)
	if errors.Is(err, inventory.ErrIncomplete) {
		return bundle.Report{ID: id}, false, nil
	}
	if err != nil {
		e.failedRuns.postpone(id, e.clock.Now())
		return prior.Report(), true, err
	}
	report, err = e.newResumedRun(b, prior, only).run(ctx)
	return report, true, err
}

// newResumedRun returns the run of resume. Its trigger matters for objects that another bundle has taken over and that
// no longer exist. With triggerDrift they are conflicts. With triggerRequest they are created again: this is for the
// retry of a failed bundle when no such other bundle is on the cluster.
func (e *Engine) newResumedRun(b bundle.Bundle, prior *inventory.Record, only map[kube.Ref]bool) *applyRun {
	if prior.State == bundle.StateApplying {
		only = nil
	}
	p := &applyRun{engine: e, bundle: b, digest: prior.BundleDigest(), trigger: triggerDrift, prior: prior, only: only}
	if prior.State == bundle.StateFailed && only == nil && !e.hasCompetingBundle(prior) {
		p.trigger = triggerRequest
	}
	return p
}

// hasCompetingBundle returns whether a bundle that has taken over objects of rec is still on the cluster.
func (e *Engine) hasCompetingBundle(rec *inventory.Record) bool {
	for _, entry := range rec.Entries {
		if id, ok := inventory.ParseID(entry.CompetingOwner); ok && e.store.Cached(id) != nil {
			return true
		}
	}
	return false
}

// CachedDigest returns the digest in the cached record of id, without a request. ok is false if no record is cached.
func (e *Engine) CachedDigest(id bundle.ID) (digest bundle.Digest, ok bool) {
	rec := e.store.Cached(id)
	if rec == nil {
		return bundle.Digest{}, false
	}
	return rec.BundleDigest(), true
}

// RecordedDigest returns the digest and the state of the bundle in the record of id. ok is false if there is no
// complete record: then the content must be delivered again.
func (e *Engine) RecordedDigest(ctx context.Context, id bundle.ID) (digest bundle.Digest, state bundle.State, ok bool, err error) {
	rec, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) {
		return bundle.Digest{}, "", false, nil
	}
	if err != nil || !rec.Exists() {
		return bundle.Digest{}, "", false, err
	}
	if intact, err := e.store.IsComplete(ctx, rec); err != nil || !intact {
		return bundle.Digest{}, "", false, err
	}
	return rec.BundleDigest(), rec.State, true, nil
}

// ConfirmScope must be called when the hub has confirmed that Options.Scope is the registration of this cluster. An
// agent stores its registration, which may be outdated. After the call Run deletes the records of earlier
// registrations.
func (e *Engine) ConfirmScope() { e.confirmScope() }

func (e *Engine) now() time.Time { return e.clock.Now().UTC().Truncate(time.Second) }

// failedReport returns report as the report of a run that ended with err, and err.
func failedReport(report bundle.Report, err error) (bundle.Report, error) {
	report.State, report.Message = bundle.StateFailed, err.Error()
	return report, err
}
