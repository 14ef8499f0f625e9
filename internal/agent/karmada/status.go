package karmada

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// reportRetry is the time until the second attempt at a report. It doubles with each, up to the interval between two looks at the member.
const reportRetry = time.Second

// beatLimit is the least time that the hub gets for one heartbeat: a late one is better than none.
const beatLimit = 5 * time.Second

// beatJitter spreads the heartbeats of a fleet: each comes up to this part of the interval early or late.
const beatJitter = 0.04

// reportAlways looks at the member and reports, at once, after each interval, and when asked to, until ctx ends.
func (l *link) reportAlways(ctx context.Context) {
	said, retry := false, reportRetry
	for {
		err := l.report(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			said, retry = false, reportRetry
		case !l.refusal.LogIfRejected(ctx, err) && !said:
			said = true
			log.FromContext(ctx).Info("cannot report on the Cluster yet", "reason", err.Error())
		}
		if err != nil && retry < l.opts.StatusInterval {
			// The hub's API servers learn of new rights one after the other.
			if !session.Sleep(ctx, l.opts.Clock, retry) {
				return
			}
			retry *= 2
			continue
		}
		if !l.awaitLook(ctx) {
			return
		}
	}
}

// awaitLook returns when it is time for another look at the member; it returns false if ctx ended first. Looks that are asked for come no more
// often than twice in an interval: if the hub insists on another status the two do not end up writing against each other.
func (l *link) awaitLook(ctx context.Context) bool {
	timer := l.opts.Clock.NewTimer(l.opts.StatusInterval)
	defer timer.Stop()
	if early := l.opts.StatusInterval/2 - l.opts.Clock.Since(l.toldAt); early > 0 && !session.Sleep(ctx, l.opts.Clock, early) {
		return false
	}
	select {
	case <-timer.C():
		return true
	case <-l.look:
		return true
	case <-ctx.Done():
		return false
	}
}

// report looks at the member, and writes the status of the Cluster if it is another one.
func (l *link) report(ctx context.Context) error {
	cluster := l.seen.Load()
	status := l.observer.Observe(ctx, cluster.Status, cluster.Spec.ResourceModels)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !l.opts.ResourceModeling && status.ResourceSummary != nil {
		status.ResourceSummary = status.ResourceSummary.DeepCopy()
		status.ResourceSummary.AllocatableModelings = nil
	}
	// The hub must hear the heartbeat before it is told how the cluster is: without one it would not believe it for long, ready or not.
	l.startBeating(ctx)
	if equality.Semantic.DeepEqual(cluster.Status, status) {
		return nil
	}
	changed := cluster.DeepCopy()
	changed.Status = status
	limited, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if !l.gate.IsOpen() {
		if _, err := l.alone(limited); err != nil {
			return err
		}
	}
	if err := l.hub.Status().Patch(limited, changed, client.MergeFrom(cluster)); err != nil {
		return fmt.Errorf("report on Cluster %s: %w", cluster.Name, err)
	}
	l.toldAt = l.opts.Clock.Now()
	// Unless the watch was faster.
	l.seen.CompareAndSwap(cluster, changed)
	return nil
}

// readiness is the status of the condition Ready, "" without one.
func readiness(status *clusterv1alpha1.ClusterStatus) string {
	if ready := meta.FindStatusCondition(status.Conditions, clusterv1alpha1.ClusterConditionReady); ready != nil {
		return string(ready.Status)
	}
	return ""
}

// disagrees says whether the hub has called the state of the cluster unknown, or what was reported is lost.
func (l *link) disagrees(cluster *clusterv1alpha1.Cluster) bool {
	ready := readiness(&cluster.Status)
	return ready == string(metav1.ConditionUnknown) || ready == "" || cluster.Status.KubernetesVersion == "" || len(cluster.Status.APIEnablements) == 0
}

// startBeating gives the first heartbeat, and has others follow.
func (l *link) startBeating(ctx context.Context) {
	select {
	case <-l.beating:
		return
	default:
	}
	l.beat(ctx)
	close(l.beating)
}

// beatAlways renews the Lease from the first heartbeat on until ctx ends.
func (l *link) beatAlways(ctx context.Context) {
	select {
	case <-l.beating:
	case <-ctx.Done():
		return
	}
	for {
		pause := time.Duration(float64(l.opts.heartbeat()) * (1 + beatJitter*(2*rand.Float64()-1)))
		if !session.SleepOrWake(ctx, l.opts.Clock, pause, l.beatSoon) {
			return
		}
		l.beat(ctx)
	}
}

// beat renews the Lease once.
func (l *link) beat(ctx context.Context) {
	err := l.renewLease(ctx)
	if ctx.Err() != nil {
		return
	}
	silent := l.silent
	l.silent = err != nil
	switch {
	case err == nil:
		l.refusal.Reset()
		if silent {
			log.FromContext(ctx).Info("the hub takes the heartbeat again")
			// It may have called the cluster unknown meanwhile.
			session.Signal(l.look)
		}
	case l.refusal.LogIfRejected(ctx, err):
	case unknown(err) && l.forgotten(ctx):
		l.end(errLost)
	case !silent:
		log.FromContext(ctx).Info("the hub does not take the heartbeat; what is deployed stays and is healed", "reason", err.Error())
	}
	l.metrics.RecordHeartbeat(err)
}

// forgotten says whether the hub does not let the agent see its Cluster any more, and then tells people.
func (l *link) forgotten(ctx context.Context) bool {
	_, err := l.readCluster(ctx)
	return l.lost.LogIfRejected(ctx, err)
}

// renewLease gives a heartbeat, unless that would hide the one of another agent that has been elected.
func (l *link) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(requestLimit, max(beatLimit, l.opts.heartbeat())))
	defer cancel()
	if l.gate.IsOpen() {
		return l.writeLease(ctx, map[string]any{})
	}
	return kube.OnConflict(ctx, func() error {
		version, err := l.alone(ctx)
		if err != nil {
			return err
		}
		return l.writeLease(ctx, map[string]any{"resourceVersion": version})
	})
}

// alone makes sure that no other agent gives heartbeats, and returns the version of the Lease that says so. Otherwise it ends the session.
func (l *link) alone(ctx context.Context) (version string, err error) {
	lease := &coordinationv1.Lease{}
	if err := l.hub.Get(ctx, l.lease(), lease); err != nil {
		return "", fmt.Errorf("read Lease %s: %w", l.lease(), err)
	}
	// One that has been silent for as long as that counts as dead: it cannot be waited for.
	heard := ptr.Deref(lease.Spec.RenewTime, metav1.MicroTime{})
	if holder := ptr.Deref(lease.Spec.HolderIdentity, ""); holder != "" && holder != l.opts.Identity && l.opts.Clock.Since(heard.Time) < l.opts.LeaseDuration {
		err := fmt.Errorf("%w: %s", errYielded, holder)
		l.end(err)
		return "", err
	}
	return lease.ResourceVersion, nil
}

func (l *link) writeLease(ctx context.Context, metadata map[string]any) error {
	unrequested, known := session.UnrequestedValue(l.engine, l.inbox.Load())
	if known && (l.toldUnrequested == nil || *l.toldUnrequested != unrequested) {
		metadata["annotations"] = map[string]any{kube.AnnotationUnrequested: session.NullIfEmpty(unrequested)}
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata, "spec": map[string]any{
		"holderIdentity": l.opts.Identity, "leaseDurationSeconds": int32(l.opts.LeaseDuration / time.Second), "renewTime": metav1.NewMicroTime(l.opts.Clock.Now()),
	}})
	if err != nil {
		return fmt.Errorf("encode heartbeat: %w", err)
	}
	lease, err := l.patchLease(ctx, l.hub, patch)
	if err != nil {
		return err
	}
	said := lease.Annotations[kube.AnnotationUnrequested]
	l.toldUnrequested = &said
	return nil
}

// patchLease changes the agent's Lease and returns it as it is then.
func (a *agent) patchLease(ctx context.Context, hub client.Client, patch []byte) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = a.lease().Namespace, a.lease().Name
	err := hub.Patch(ctx, lease, client.RawPatch(types.MergePatchType, patch))
	if errors.Is(err, context.DeadlineExceeded) {
		err = errors.New("the hub does not answer")
	}
	if err != nil {
		return nil, fmt.Errorf("renew Lease %s: %w", a.lease(), err)
	}
	return lease, nil
}
