package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/join"
)

// simulatedFleet are the clusters with their agents, and the observations of their bundles.
type simulatedFleet struct {
	hub    *testHub
	agents sync.WaitGroup
	ctx    context.Context //nolint:containedctx // the life of all agents

	// mu guards the fields below.
	mu sync.Mutex
	// arrived has the time and digest of the last bundle at an agent, by cluster and summary. provisioned has the time
	// and hash of the last status Provisioned, by summary.
	arrived     map[bundleKey]observation
	provisioned map[bundleKey]observation
	// ready has the time when a cluster was Healthy first, running has the clusters with an agent, and engines has the
	// engines of the agents that have connected.
	ready   map[string]time.Time
	running map[string]bool
	engines map[string]*noopEngine
	// contacts has the first successful heartbeat of each agent since the last outage, and the first start of each watch.
	contacts map[contactKey]time.Time
	// errors is the number of requests of agents that failed.
	errors  int
	changed chan struct{}
}

// contactKey names a contact of the agent of a cluster with the hub: "heartbeat", or the kind of a watched list.
type contactKey struct{ cluster, contact string }

// contactsOfAgent is the number of contacts of a working agent: the heartbeat and two watches.
const contactsOfAgent = 3

// bundleKey names a bundle: its cluster and its ClusterSummary.
type bundleKey struct{ cluster, summary string }

type observation struct {
	at     time.Time
	digest bundle.Digest
}

func newFleet(ctx context.Context, hub *testHub) *simulatedFleet {
	return &simulatedFleet{
		hub: hub, ctx: ctx, arrived: map[bundleKey]observation{}, provisioned: map[bundleKey]observation{}, ready: map[string]time.Time{},
		running: map[string]bool{}, engines: map[string]*noopEngine{}, contacts: map[contactKey]time.Time{},
		changed: make(chan struct{}),
	}
}

// notify wakes all waits. The caller holds mu.
func (f *simulatedFleet) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *simulatedFleet) recordArrival(cluster, summary string, digest bundle.Digest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.arrived[bundleKey{cluster, summary}] = observation{time.Now(), digest}
	f.notify()
}

func (f *simulatedFleet) recordContact(cluster, contact string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if key := (contactKey{cluster, contact}); f.contacts[key].IsZero() {
		f.contacts[key] = time.Now()
		f.notify()
	}
}

// forgetContacts begins an outage.
func (f *simulatedFleet) forgetContacts() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.contacts)
}

// connected returns when the agents had made all their contacts since the last outage. The caller holds mu.
func (f *simulatedFleet) connected() []time.Time {
	made, last := map[string]int{}, map[string]time.Time{}
	for key, at := range f.contacts {
		made[key.cluster]++
		last[key.cluster] = latest(last[key.cluster], at)
	}
	var times []time.Time
	for cluster, contacts := range made {
		if contacts == contactsOfAgent {
			times = append(times, last[cluster])
		}
	}
	return times
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (f *simulatedFleet) countError(error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errors++
}

// watch follows the summaries and clusters of the hub until ctx ends.
func (f *simulatedFleet) watch(ctx context.Context) {
	go f.follow(ctx, func() client.ObjectList { return &configv1beta1.ClusterSummaryList{} }, f.recordSummary)
	go f.follow(ctx, func() client.ObjectList { return &libv1beta1.SveltosClusterList{} }, f.recordCluster)
	go f.follow(ctx, func() client.ObjectList { return &corev1.SecretList{} }, f.startAgent)
}

// follow watches from the beginning, again after each end of the watch.
func (f *simulatedFleet) follow(ctx context.Context, list func() client.ObjectList, record func(client.Object)) {
	for ctx.Err() == nil {
		events, err := f.hub.client.Watch(ctx, list())
		if err != nil {
			sleep(ctx, 100*time.Millisecond) // the API server is away
			continue
		}
		for event := range events.ResultChan() {
			if obj, ok := event.Object.(client.Object); ok && event.Type != watch.Deleted {
				record(obj)
			}
		}
		events.Stop()
	}
}

func (f *simulatedFleet) recordSummary(obj client.Object) {
	summary := obj.(*configv1beta1.ClusterSummary)
	for _, feature := range summary.Status.FeatureSummaries {
		if feature.Status != libv1beta1.FeatureStatusProvisioned {
			continue
		}
		f.mu.Lock()
		key := bundleKey{summary.Spec.ClusterName, summary.Name}
		if digest := bundle.DigestFromBytes(feature.Hash); f.provisioned[key].digest != digest {
			f.provisioned[key] = observation{time.Now(), digest}
			f.notify()
		}
		f.mu.Unlock()
	}
}

func (f *simulatedFleet) recordCluster(obj client.Object) {
	cluster := obj.(*libv1beta1.SveltosCluster)
	if !cluster.Status.Ready || cluster.Status.ConnectionStatus != libv1beta1.ConnectionHealthy {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := f.ready[cluster.Name]; !known {
		f.ready[cluster.Name] = time.Now()
		f.notify()
	}
}

// startAgent starts the agent of a cluster when its manifest is there.
func (f *simulatedFleet) startAgent(obj client.Object) {
	secret := obj.(*corev1.Secret)
	name, isRegistration := strings.CutSuffix(secret.Name, join.RegistrationSecret(""))
	if !isRegistration || len(secret.Data[join.ManifestKey]) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running[name] {
		return
	}
	f.running[name] = true
	f.agents.Go(func() {
		agent, err := newAgent(f.ctx, f, client.ObjectKey{Namespace: secret.Namespace, Name: name}, secret.Data[join.ManifestKey])
		if err != nil {
			f.countError(err)
			return
		}
		f.mu.Lock()
		f.engines[name] = agent.engine
		f.mu.Unlock()
		agent.run(f.ctx)
	})
}

// register creates SveltosClusters in pull mode: all in the namespace shared, or each in its own if that is "".
func (f *simulatedFleet) register(ctx context.Context, names []string, shared string, labels func(i int) map[string]string) error {
	return inParallel(len(names), func(i int) error {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: cmp.Or(shared, names[i])}}
		if err := f.hub.client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: names[i], Labels: labels(i)}}
		cluster.Spec.PullMode = true
		return f.hub.client.Create(ctx, cluster)
	})
}

// inParallel calls do for 0 to n-1, 20 at a time, and returns the first error.
func inParallel(n int, do func(i int) error) error {
	limit, failed := make(chan struct{}, 20), make(chan error, n)
	for i := range n {
		limit <- struct{}{}
		go func() {
			failed <- do(i)
			<-limit
		}()
	}
	for range n {
		if err := <-failed; err != nil {
			return err
		}
	}
	return nil
}

// await waits until times returns at least want entries, and returns their delays after began, sorted.
func (f *simulatedFleet) await(ctx context.Context, description string, want int, began time.Time, times func() []time.Time) ([]time.Duration, error) {
	for {
		f.mu.Lock()
		found, changed := times(), f.changed
		f.mu.Unlock()
		if len(found) >= want {
			delays := make([]time.Duration, 0, len(found))
			for _, at := range found {
				delays = append(delays, at.Sub(began))
			}
			slices.Sort(delays)
			return delays, nil
		}
		select {
		case <-changed:
			sleep(ctx, 5*time.Millisecond) // counting after each of thousands of events would be quadratic
		case <-ctx.Done():
			return nil, fmt.Errorf("%s: %d of %d: %w", description, len(found), want, ctx.Err())
		}
	}
}

// observedAfter returns a function for await: the times of observations in all that are after began. The caller of the
// function holds mu.
func observedAfter(all map[bundleKey]observation, began time.Time) func() []time.Time {
	return func() []time.Time {
		var times []time.Time
		for _, o := range all {
			if o.at.After(began) {
				times = append(times, o.at)
			}
		}
		return times
	}
}
