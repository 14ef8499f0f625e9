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
	// OnReport is called if the report of a bundle changes without a call of Converge. It is also called if the record of
	// a bundle no longer exists, and if a withdrawal is complete or begins to fail: then the caller must call Converge or
	// Withdraw again. It may block, but not longer than Run's context.
	OnReport func(bundle.ID)
	// Scope is the UID of the object that declares the cluster on the hub (inventory.OwnerScope.Registration), and Hub the
	// UID of the hub. They separate this Engine from others on the same cluster: Engines of different scopes do not see
	// each other's inventories. Objects of another hub are never changed. A delivery takes over objects of another scope
	// of the same hub. Both are empty for a SveltosCluster.
	Scope string
	Hub   string
	// Partitions divide the bundles among several processes. Nil: this Engine has all bundles of its scope. Otherwise the
	// caller must call Serve before other methods for a bundle.
	Partitions *inventory.Partitions
	// RecordMemory limits the memory of the records: of the cached ones, and while they are decoded. It also limits that
	// of the release records, while they are used. Nil is no limit.
	RecordMemory *kube.Reservation
	// OnChange is called, while Run runs, for a bundle with the option CorrectDrift whose objects have changed: their
	// status, or by this Engine. Events within a short time cause one call, and later ones a call after some seconds. The
	// deletion of an object is not delayed. It may block, but not longer than Run's context.
	OnChange func(bundle.ID)
	// RequestLimit limits each request to the cluster, except watches. Default: one minute.
	RequestLimit time.Duration
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
	// running is true while Run runs, which then repeats failed runs.
	running    atomic.Bool
	failedRuns failedRuns
	lost       lostBundles

	// A run or withdrawal locks its ID in ids, and then all its objects in objects, until it ends. So bundles with the
	// same object see each other's ownership labels.
	ids     *keyLock[bundle.ID]
	objects *keyLock[kube.Ref]
	// waits has the conditions that Helm releases wait for.
	waits waitList
	// confirmed is closed by confirm once the hub has confirmed that ownerScope is that of this cluster.
	confirmed chan struct{}
	confirm   func()
}

// New returns an Engine for the cluster of cfg, whose limits on requests per second hold for all its requests together.
// It does not connect yet. It fails if cfg cannot be used.
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
	cfg.Wrap(limitRequests(cmp.Or(opts.RequestLimit, requestLimit)))
	member, core, err := connect(cfg)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		member: member, clock: opts.Clock, onCorrect: opts.OnCorrect, onReport: opts.OnReport, onChange: opts.OnChange, ownerScope: inventory.OwnerScope{Hub: opts.Hub, Registration: opts.Scope},
		recordMemory: opts.RecordMemory,
		ids:          newKeyLock[bundle.ID](), objects: newKeyLock[kube.Ref](),
		confirmed: make(chan struct{}), observed: &observedStates{byID: map[bundle.ID]map[kube.Ref]observedState{}},
	}
	e.confirm = sync.OnceFunc(func() { close(e.confirmed) })
	e.store = inventory.NewPartitionedStore(core, member.metadataClient, opts.Namespace, e.ownerScope, opts.Partitions)
	e.store.LimitMemory(opts.RecordMemory)
	return e, nil
}

// connect makes the clients of the cluster of cfg, over one connection.
func connect(cfg *rest.Config) (*memberClient, corev1client.CoreV1Interface, error) {
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

// Converge makes the cluster equal b: it applies new and changed objects, and prunes objects that b no longer has. If
// the inventory is lost, Converge rebuilds it from the objects with our ownership labels. The error is nil if the
// report's state is Applied, or Applying while a Helm release waits. It wraps ErrConflict if an object belongs to
// another profile. After an error the next call continues from the inventory. It wraps bundle.TerminalError if Run
// repeats the failed run, or if only another bundle can succeed: until then, further calls return the same result and
// send no request. Without the option CorrectDrift, an applied bundle is not read again until it changes. Outdated
// releases of the report have not begun, see CompareRenderings.
func (e *Engine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	p, unlock, err := e.newDelivery(ctx, b)
	if err != nil {
		return failed(bundle.Report{ID: b.ID, Digest: p.digest}, err)
	}
	defer unlock()
	if run := e.findFailedRun(b.ID, p.digest); run != nil {
		return run.report, e.asTerminal(run.err)
	}
	if err := p.load(ctx); err != nil {
		return failed(bundle.Report{ID: b.ID, Digest: p.digest}, err)
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
		e.lost.remove(b.ID)
	}
	return report, err
}

// newDelivery locks the ID of b and returns a run that has not begun. The caller must call load before run, and unlock
// at the end.
func (e *Engine) newDelivery(ctx context.Context, b bundle.Bundle) (p *applyRun, unlock func(), err error) {
	p = &applyRun{engine: e, bundle: b}
	if p.digest, err = b.Digest(); err != nil {
		return p, nil, err
	}
	unlock, err = e.ids.acquire(ctx, b.ID)
	return p, unlock, err
}

// load reads the record of the bundle.
func (p *applyRun) load(ctx context.Context) (err error) {
	store := p.engine.store
	if p.prior, err = store.Load(ctx, p.bundle.ID); errors.Is(err, inventory.ErrIncomplete) {
		p.lost, err = true, nil
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

// resume converges the objects in only, or all objects if only is nil or the bundle is being applied, from the content
// in the record of id. A suspended bundle is not changed. ok is false if there is no complete record, or if the bundle
// is being withdrawn: then the content must be delivered again. The caller must hold the lock of id.
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

// newResumedRun returns the run that resume begins. With triggerDrift, an object that another bundle has taken over
// stays a conflict, even if it no longer exists. A retry of a failed bundle uses triggerRequest if none of those other
// bundles is on the cluster any more: then it creates such objects again.
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

// CachedDigest returns the digest in the record of id as it was last read or written, without a request. ok is false if
// there is none.
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

// ConfirmScope must be called when the hub has confirmed that Options.Scope is the registration of this cluster, since
// the registration that the agent has stored may be outdated. Then Run deletes the records of earlier registrations.
func (e *Engine) ConfirmScope() { e.confirm() }

func (e *Engine) now() time.Time { return e.clock.Now().UTC().Truncate(time.Second) }

// failed returns report with the state and the message of a run that ended with err.
func failed(report bundle.Report, err error) (bundle.Report, error) {
	report.State, report.Message = bundle.StateFailed, err.Error()
	return report, err
}
