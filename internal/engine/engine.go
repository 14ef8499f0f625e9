package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/discovery"
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
	// Namespace is where the records are kept; it is created when the first one is. Default: kube.AgentNamespace.
	Namespace string
	// OnHeal is called after Run has put something back, or tried to, with what it did; and without changes when it finds
	// that a record was lost, so that the bundle has to be delivered again. It must not block for long.
	OnHeal func(bundle.ID, bundle.ChangeSet)
	// Scope and Hub distinguish the objects of this Engine from those of others on the same cluster: the uid of the
	// object that declares the cluster, and that of its hub. Engines of different scope do not see each other's records,
	// and objects of another hub are never touched; those of another scope of the same hub are taken over by what is
	// delivered. Both are empty on the Sveltos surface.
	Scope string
	Hub   string
	// OnChange is told, while Run runs, of which bundles with the option Heal there is news of objects: their status
	// included, and what this Engine did. News of one bundle that comes together is told once, and what comes soon after
	// that is told some seconds later, unless an object went. It may wait, but not beyond the end of Run's context.
	OnChange func(bundle.ID)
	// Clock stamps reports and paces healing. Default: the real clock.
	Clock clock.WithTicker
}

// Engine makes one cluster equal its bundles. What it must remember it keeps on that cluster, in one record per bundle,
// so that it can be killed at any moment and another Engine goes on where it was. One Engine at a time may work on a
// cluster.
type Engine struct {
	member *memberClient
	store  *inventory.Store
	clock  clock.WithTicker
	onHeal func(bundle.ID, bundle.ChangeSet)
	// onChange is that of the Options.
	onChange   func(bundle.ID)
	ownerScope inventory.OwnerScope
	observed   *observedStates

	// ids is held, one ID at a time, for a whole run or withdrawal; objects after it, for the same time: bundles that
	// want the same object see each other's marks.
	ids     *keyLock[bundle.ID]
	objects *keyLock[kube.Ref]
	// waits is what Helm releases wait for.
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
	if opts.OnHeal == nil {
		opts.OnHeal = func(bundle.ID, bundle.ChangeSet) {}
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
	cfg.Wrap(trackResponses)
	member, core, err := connect(cfg)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		member: member, clock: opts.Clock, onHeal: opts.OnHeal, onChange: opts.OnChange, ownerScope: inventory.OwnerScope{Hub: opts.Hub, Registration: opts.Scope},
		ids: newKeyLock[bundle.ID](), objects: newKeyLock[kube.Ref](),
		confirmed: make(chan struct{}), observed: &observedStates{byID: map[bundle.ID]map[kube.Ref]observedState{}},
	}
	e.confirm = sync.OnceFunc(func() { close(e.confirmed) })
	e.store = inventory.NewStore(core, member.objects, opts.Namespace, e.ownerScope)
	return e, nil
}

// connect makes the clients of the cluster of cfg, over one connection.
func connect(cfg *rest.Config) (*memberClient, corev1client.CoreV1Interface, error) {
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, nil, fmt.Errorf("make a client of the member: %w", err)
	}
	objects, err := metadata.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a metadata client of the member: %w", err)
	}
	wholes, err := dynamic.NewForConfigAndClient(cfg, client)
	if err != nil {
		return nil, nil, fmt.Errorf("make a dynamic client of the member: %w", err)
	}
	found, err := discovery.NewDiscoveryClientForConfigAndClient(cfg, client)
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
		objects: objects, dynamicClient: wholes, core: core, namespaces: core.Namespaces(), raw: found.RESTClient(), served: found, mapper: kube.NewMapper(found),
	}, core, nil
}

// Converge makes the cluster equal b: it applies what is new or different and prunes what b no longer holds. If the
// record turns out to be lost, what it held is what carries our marks. The error is nil exactly when the report says
// Applied; it wraps ErrConflict if an object belongs to another profile. After an error what could not be done is still
// in the record, and converging again goes on from there. If b's options do not say Heal, a bundle that was applied
// once is not looked at again until it changes.
func (e *Engine) Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error) {
	report := bundle.Report{ID: b.ID}
	digest, err := b.Digest()
	if err != nil {
		return failed(report, err)
	}
	report.Digest = digest
	release, err := e.ids.acquire(ctx, b.ID)
	if err != nil {
		return failed(report, err)
	}
	defer release()
	prior, err := e.store.Load(ctx, b.ID)
	spoilt := errors.Is(err, inventory.ErrIncomplete)
	if err != nil && !spoilt {
		return failed(report, err)
	}
	intact, err := e.store.IsComplete(ctx, prior)
	if err != nil {
		return failed(report, err)
	}
	if !intact {
		prior = prior.WithoutContent()
	}
	if !b.Options.Heal && prior.State == bundle.StateApplied && prior.BundleDigest() == digest {
		return prior.Report(), nil
	}
	if intact && prior.BundleDigest() == digest && prior.State == bundle.StateApplying && e.isWaiting(ctx, b.ID, digest) {
		return prior.Report(), nil
	}
	p := &applyRun{engine: e, bundle: b, digest: digest, prior: prior, lost: spoilt}
	if prior.BundleDigest() != digest {
		p.trigger = triggerDelivery
	}
	return p.run(ctx)
}

// Resume converges id again from the content in its record; one that is suspended is left as it is. ok is false if
// there is no complete record, or one that is being withdrawn: then the content has to be delivered again.
func (e *Engine) Resume(ctx context.Context, id bundle.ID) (report bundle.Report, ok bool, err error) {
	release, err := e.ids.acquire(ctx, id)
	if err != nil {
		return bundle.Report{ID: id}, false, err
	}
	defer release()
	return e.resume(ctx, id, triggerRequest, nil)
}

// resume converges the objects in only, or all of them if only is nil or the last run did not end well. Its caller has
// acquired id.
func (e *Engine) resume(ctx context.Context, id bundle.ID, cause trigger, only map[kube.Ref]bool) (bundle.Report, bool, error) {
	prior, err := e.store.Load(ctx, id)
	if errors.Is(err, inventory.ErrIncomplete) || (err == nil && (!prior.Exists() || prior.State == bundle.StateRemoving)) {
		return bundle.Report{ID: id}, false, nil
	}
	if err != nil {
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
		return prior.Report(), true, err
	}
	if prior.State != bundle.StateApplied {
		only = nil
	}
	p := &applyRun{engine: e, bundle: b, digest: prior.BundleDigest(), trigger: cause, prior: prior, only: only}
	report, err := p.run(ctx)
	return report, true, err
}

// Have says which bundle the member's record of id holds and how far it is. ok is false if there is no complete record:
// then the content has to be delivered again.
func (e *Engine) Have(ctx context.Context, id bundle.ID) (digest bundle.Digest, state bundle.State, ok bool, err error) {
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

// ConfirmScope tells Run that the hub has said that Options.Scope is the registration of this cluster. Only then are
// the records of other registrations earlier ones: what the cluster itself remembers of its registration may be wrong.
func (e *Engine) ConfirmScope() { e.confirm() }

func (e *Engine) now() time.Time { return e.clock.Now().UTC().Truncate(time.Second) }

// failed returns report as one of a run that ended with err.
func failed(report bundle.Report, err error) (bundle.Report, error) {
	report.State, report.Message = bundle.StateFailed, err.Error()
	return report, err
}
