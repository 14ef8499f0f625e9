package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/kube"
)

const (
	// heartbeatInterval, heartbeatJitter and agentWorkers have the values of the real agent.
	heartbeatInterval = 20 * time.Second
	heartbeatJitter   = 0.2
	agentWorkers      = 4
	// memberVersion is the Kubernetes version that simulated agents report.
	memberVersion = "v1.36.3"
	// refusedName is the name of an object that the simulated members refuse.
	refusedName = "refused"
)

// simulatedAgent is the agent of one cluster without a member.
type simulatedAgent struct {
	cluster client.ObjectKey
	fleet   *simulatedFleet
	hub     client.WithWatch
	// credential is the agent's own, exchanged for the one in the manifest.
	credential *credentials.Credential
	engine     *noopEngine
}

// newAgent starts the session of an agent with the manifest that the hub has written for its cluster.
func newAgent(ctx context.Context, fleet *simulatedFleet, cluster client.ObjectKey, manifest []byte) (*simulatedAgent, error) {
	secret, err := kubeconfigSecret(manifest)
	if err != nil {
		return nil, err
	}
	credential, err := credentials.Open(ctx, credentials.Options{
		Secrets: fake.NewClientset(secret).CoreV1().Secrets(kube.AgentNamespace), Secret: secret.Name, Namespace: cluster.Namespace, Name: cluster.Name,
	})
	if err != nil {
		return nil, err
	}
	if err := credential.Exchange(ctx); err != nil {
		return nil, err
	}
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []string{libv1beta1.SveltosClusterKind, libv1beta1.ConfigurationGroupKind, libv1beta1.ConfigurationBundleKind} {
		mapper.Add(libv1beta1.GroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Secret"), meta.RESTScopeNamespace)
	config := deliver.LimitResponses(credential.Config())
	config.QPS = -1
	hub, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme(), Mapper: mapper})
	if err != nil {
		return nil, err
	}
	a := &simulatedAgent{cluster: cluster, fleet: fleet, hub: watchRecorder{hub, fleet, cluster.Name}, credential: credential}
	a.engine = &noopEngine{agent: a, digests: map[bundle.ID]bundle.Digest{}, refused: map[bundle.ID]bundle.Report{}}
	return a, nil
}

// watchRecorder records the starts of the watches of an agent.
type watchRecorder struct {
	client.WithWatch

	fleet   *simulatedFleet
	cluster string
}

// Watch starts a watch.
func (r watchRecorder) Watch(ctx context.Context, list client.ObjectList, opts ...client.ListOption) (watch.Interface, error) {
	events, err := r.WithWatch.Watch(ctx, list, opts...)
	if err == nil {
		r.fleet.recordContact(r.cluster, fmt.Sprintf("%T", list))
	}
	return events, err
}

// kubeconfigSecret returns the Secret in an agent's manifest.
func kubeconfigSecret(manifest []byte) (*corev1.Secret, error) {
	objects, err := kube.DecodeManifest(manifest)
	if err != nil {
		return nil, err
	}
	for _, obj := range objects {
		if obj.GetKind() == "Secret" {
			secret := &corev1.Secret{}
			return secret, runtime.DefaultUnstructuredConverter.FromUnstructured(obj.Object, secret)
		}
	}
	return nil, fmt.Errorf("the manifest has no Secret")
}

// run works for the hub until ctx ends.
func (a *simulatedAgent) run(ctx context.Context) {
	source := deliver.NewAgentSource(a.hub, a.credential.DeliveryNamespace(), a.cluster.Name)
	worker := &session.Worker{
		Source: source, Engine: a.engine, Gate: session.NewGate(false), OnKindsChanged: func() {}, OnConverged: func(error) {}, OnWithdrawn: func() {},
	}
	var running sync.WaitGroup
	running.Go(func() { a.runHeartbeats(ctx) })
	running.Go(func() {
		session.ClusterWatcher[*libv1beta1.SveltosCluster]{
			Key: a.cluster, Example: &libv1beta1.SveltosCluster{}, NewList: func() client.ObjectList { return &libv1beta1.SveltosClusterList{} },
			OnChange: func(ctx context.Context, cluster *libv1beta1.SveltosCluster) { a.reportReady(ctx, cluster) },
		}.Run(ctx, a.hub)
	})
	running.Go(func() { _ = source.Run(ctx, agentWorkers, worker.Handle) }) // it ends with ctx
	running.Wait()
}

// runHeartbeats claims the Lease and renews it.
func (a *simulatedAgent) runHeartbeats(ctx context.Context) {
	for {
		patch := map[string]any{
			"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationMember: "member-of-" + a.cluster.Name, kube.AnnotationExchanged: a.credential.ExchangedSecretUID(), kube.AnnotationDecrypts: a.cluster.Name}},
			"spec": map[string]any{
				"holderIdentity": a.cluster.Name, "leaseDurationSeconds": int32(heartbeats.LeaseDuration / time.Second), "renewTime": metav1.NewMicroTime(time.Now()),
			},
		}
		lease := &coordinationv1.Lease{}
		lease.Namespace, lease.Name = a.credential.DeliveryNamespace(), a.cluster.Name
		pause := time.Duration(float64(heartbeatInterval) * (1 - heartbeatJitter*rand.Float64()))
		if err := a.patch(ctx, lease, a.hub.Patch, patch); err == nil {
			a.fleet.recordContact(a.cluster.Name, "heartbeat")
		} else if ctx.Err() == nil {
			a.fleet.countError(err)
			pause = session.Jitter(session.MaxRetryDelay)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// reportReady reports the facts of the member unless the status of the cluster has them.
func (a *simulatedAgent) reportReady(ctx context.Context, cluster *libv1beta1.SveltosCluster) {
	if cluster.Status.Ready {
		return
	}
	patch := map[string]any{"status": map[string]any{
		"ready": true, "version": memberVersion, "apiVersions": []string{"apps/v1", "apps/v1/Deployment", "v1", "v1/ConfigMap", "v1/Secret"},
		"agentLastReportTime": metav1.NewTime(time.Now()),
	}}
	write := func(ctx context.Context, obj client.Object, patch client.Patch, _ ...client.PatchOption) error {
		return a.hub.Status().Patch(ctx, obj, patch)
	}
	if err := a.patch(ctx, cluster.DeepCopy(), write, patch); err != nil && ctx.Err() == nil {
		a.fleet.countError(err)
	}
}

func (a *simulatedAgent) patch(
	ctx context.Context, obj client.Object, write func(context.Context, client.Object, client.Patch, ...client.PatchOption) error, content map[string]any,
) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	return write(ctx, obj, client.RawPatch(types.MergePatchType, data))
}

// noopEngine accepts every bundle and applies nothing. It fails for bundles with an object that is named "refused".
type noopEngine struct {
	agent *simulatedAgent

	mu      sync.Mutex                  // guards the fields below
	digests map[bundle.ID]bundle.Digest // of accepted bundles
	refused map[bundle.ID]bundle.Report
}

// Converge accepts b, and records its arrival.
func (e *noopEngine) Converge(_ context.Context, b bundle.Bundle) (bundle.Report, error) {
	digest, err := b.Digest()
	if err != nil {
		return bundle.Report{}, err
	}
	for _, ref := range b.Refs() {
		if ref.Name == refusedName {
			report := bundle.Report{ID: b.ID, Digest: digest, State: bundle.StateFailed, Message: "ConfigMap refused is refused by the simulated member"}
			e.mu.Lock()
			defer e.mu.Unlock()
			e.refused[b.ID] = report
			return report, &bundle.TerminalError{Err: errors.New(report.Message)}
		}
	}
	e.agent.fleet.recordArrival(e.agent.cluster.Name, b.ID.RequestorName, digest)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.digests[b.ID] = digest
	return appliedReport(b.ID, digest), nil
}

func appliedReport(id bundle.ID, digest bundle.Digest) bundle.Report {
	return bundle.Report{ID: id, Digest: digest, State: bundle.StateApplied, Kinds: []string{"ConfigMap.v1."}, LastApplied: time.Now()}
}

// accept makes a bundle that the hub has not delivered an accepted one.
func (e *noopEngine) accept(id bundle.ID, digest bundle.Digest) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.digests[id] = digest
}

// Withdraw forgets a bundle.
func (e *noopEngine) Withdraw(_ context.Context, w bundle.Withdrawal) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.digests, w.ID)
	return true, nil
}

// FindDeployed returns an accepted bundle.
func (e *noopEngine) FindDeployed(_ context.Context, id bundle.ID) (bundle.Deployed, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	digest, ok := e.digests[id]
	return bundle.Deployed{ID: id, Report: appliedReport(id, digest)}, ok, nil
}

// ListDeployed lists the accepted bundles.
func (e *noopEngine) ListDeployed(context.Context) ([]bundle.Deployed, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var all []bundle.Deployed
	for _, id := range slices.SortedFunc(maps.Keys(e.digests), func(a, b bundle.ID) int { return strings.Compare(a.String(), b.String()) }) {
		all = append(all, bundle.Deployed{ID: id, Report: appliedReport(id, e.digests[id])})
	}
	return all, nil
}

// CompareRenderings accepts every rendering.
func (e *noopEngine) CompareRenderings(context.Context, bundle.Bundle) (bundle.Report, error) {
	return bundle.Report{}, nil
}

// CachedDigest returns the digest of an accepted bundle.
func (e *noopEngine) CachedDigest(id bundle.ID) (bundle.Digest, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	digest, ok := e.digests[id]
	return digest, ok
}

// RecordedDigest returns the digest of an accepted bundle.
func (e *noopEngine) RecordedDigest(_ context.Context, id bundle.ID) (bundle.Digest, bundle.State, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	digest, ok := e.digests[id]
	return digest, bundle.StateApplied, ok, nil
}

// Failure returns the report of a refused bundle, as the real engine does between its retries.
func (e *noopEngine) Failure(id bundle.ID, digest bundle.Digest) (bundle.Report, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	report, ok := e.refused[id]
	return report, ok && report.Digest == digest
}

// ListCachedDeployed lists the accepted bundles.
func (e *noopEngine) ListCachedDeployed() ([]bundle.Deployed, bool) {
	all, err := e.ListDeployed(context.Background())
	return all, err == nil
}
