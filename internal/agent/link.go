package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/kube"
)

const (
	// jitter spreads the heartbeats of a fleet: each comes up to a fifth of the interval early.
	jitter = 0.2
	// requestLimit is how long the hub may take for one small write.
	requestLimit = 15 * time.Second
	// hubQPS is how many requests per second one agent makes at most: a big delivery takes some dozens, and the hub has
	// many agents.
	hubQPS = 50
	// announceRetryFirst and announceRetryLast bound the growing time between attempts to report on the cluster object.
	announceRetryFirst = time.Second
	announceRetryLast  = 30 * time.Second
)

// link tells the hub that the member is alive and what it is. It never stops trying.
type link struct {
	hub     client.Client
	cluster client.ObjectKey
	lease   client.ObjectKey
	// member tells this cluster from others, whose agents may have the same credential.
	member    types.UID
	identity  string
	heartbeat time.Duration
	clock     clock.WithTicker
	metrics   *session.Metrics
	self      *self
	checks    *checks
	refusal   *session.AuthErrorLog
	// exchanged returns what the hub is to know of the exchange of the manifest's token, and told what it was told in
	// this session.
	exchanged func() types.UID
	told      types.UID
	// beatSoon holds one request for a heartbeat that does not wait for its time.
	beatSoon chan struct{}
	// unrequested returns the value of kube.AnnotationUnrequested to write on the Lease. toldUnrequested is the value
	// in the hub's last answer; nil means not known.
	unrequested     func() (value string, known bool)
	toldUnrequested *string
}

// newHubClient returns a client for the few kinds that an agent deals with. It asks the hub for no API list.
func newHubClient(config *rest.Config) (client.WithWatch, error) {
	mapper := meta.NewDefaultRESTMapper(nil)
	for _, kind := range []string{libv1beta1.SveltosClusterKind, libv1beta1.ConfigurationGroupKind, libv1beta1.ConfigurationBundleKind} {
		mapper.Add(libv1beta1.GroupVersion.WithKind(kind), meta.RESTScopeNamespace)
	}
	mapper.Add(coordinationv1.SchemeGroupVersion.WithKind("Lease"), meta.RESTScopeNamespace)
	config = deliver.LimitResponses(config)
	config.QPS, config.Burst = hubQPS, 2*hubQPS
	hub, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme(), Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("make client for the hub: %w", err)
	}
	return hub, nil
}

// beat renews the Lease until ctx ends, or until the Lease is another member's: then it returns errDisplaced.
func (l *link) beat(ctx context.Context) error {
	silent := false
	for {
		err := l.renewLease(ctx)
		switch {
		case errors.Is(err, errDisplaced):
			l.metrics.RecordHeartbeat(err)
			return err
		case err != nil && ctx.Err() != nil:
		case err != nil && l.refusal.LogIfRejected(ctx, err):
			silent = true
		case err != nil && !silent:
			silent = true
			log.FromContext(ctx).Info("the hub does not take the heartbeat; what is deployed stays and is healed", "reason", err.Error())
		case err == nil && silent:
			silent = false
			log.FromContext(ctx).Info("the hub takes the heartbeat again")
			// It may have called the member Down meanwhile.
			l.self.announceSoon()
		}
		if err == nil {
			l.refusal.Reset()
		}
		l.metrics.RecordHeartbeat(err)
		if !session.SleepOrWake(ctx, l.clock, time.Duration(float64(l.heartbeat)*(1-jitter*rand.Float64())), l.beatSoon) {
			return nil
		}
	}
}

// renewLease renews the Lease, which belongs to this member, or to none.
func (l *link) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	lease, err := l.writeLease(ctx, "")
	if err != nil {
		return err
	}
	switch lease.Annotations[kube.AnnotationMember] {
	case string(l.member):
		return nil
	case "":
		_, err := l.writeLease(ctx, lease.ResourceVersion)
		return err
	default:
		return errDisplaced
	}
}

// writeLease renews the Lease and returns it. Given a version, it makes that version this member's.
func (l *link) writeLease(ctx context.Context, version string) (*coordinationv1.Lease, error) {
	content := map[string]any{"spec": map[string]any{
		"holderIdentity": l.identity, "renewTime": metav1.NewMicroTime(l.clock.Now()),
	}}
	annotations := map[string]any{}
	exchanged := l.exchanged()
	if exchanged != l.told {
		annotations[kube.AnnotationExchanged] = exchanged
	}
	unrequested, known := l.unrequested()
	if known && (l.toldUnrequested == nil || *l.toldUnrequested != unrequested) {
		annotations[kube.AnnotationUnrequested] = session.NullIfEmpty(unrequested)
	}
	changes := map[string]any{"annotations": annotations}
	if version != "" {
		changes["resourceVersion"], annotations[kube.AnnotationMember] = version, l.member
	}
	content["metadata"] = changes
	patch, err := json.Marshal(content)
	if err != nil {
		return nil, fmt.Errorf("encode heartbeat: %w", err)
	}
	lease := &coordinationv1.Lease{}
	lease.Namespace, lease.Name = l.lease.Namespace, l.lease.Name
	if err := l.hub.Patch(ctx, lease, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return nil, fmt.Errorf("renew Lease %s: %w", l.lease, err)
	}
	l.told = exchanged
	said := lease.Annotations[kube.AnnotationUnrequested]
	l.toldUnrequested = &said
	return lease, nil
}

// announce reports on the cluster object: at once, when something changed, and every five minutes, until ctx ends.
func (l *link) announce(ctx context.Context) {
	pause := announceRetryFirst
	for {
		err := l.report(ctx)
		wait := refreshInterval
		if err == nil {
			pause = announceRetryFirst
		} else {
			if ctx.Err() == nil && pause == announceRetryFirst && !l.refusal.LogIfRejected(ctx, err) {
				log.FromContext(ctx).Info("cannot report on the cluster object yet", "reason", err.Error())
			}
			wait = time.Duration(float64(pause) * (1 - jitter*rand.Float64()))
			pause = min(pause*2, announceRetryLast)
		}
		timer := l.clock.NewTimer(wait)
		select {
		case <-timer.C():
		case <-l.self.news:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (l *link) report(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	facts, verdict := l.self.known(), l.checks.known()
	if facts.Version == "" || !verdict.known {
		// Ready means that the member's own API has answered too, and that its checks pass.
		return nil
	}
	status := verdict.status()
	status["version"], status["apiVersions"] = reportedVersion(facts), facts.APIVersions
	status["agentLastReportTime"] = metav1.NewTime(l.clock.Now())
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	cluster := &libv1beta1.SveltosCluster{}
	cluster.Namespace, cluster.Name = l.cluster.Namespace, l.cluster.Name
	if err := l.hub.Status().Patch(ctx, cluster, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("report on SveltosCluster %s: %w", l.cluster, err)
	}
	return nil
}

// agrees says whether the cluster object tells what the member is. Otherwise somebody made it anew or lost its status.
func (l *link) agrees(cluster *libv1beta1.SveltosCluster) bool {
	facts, verdict := l.self.known(), l.checks.known()
	return facts.Version == "" || !verdict.known || (verdict.agrees(cluster.Status) && cluster.Status.Version == reportedVersion(facts) &&
		slices.Equal(cluster.Status.APIVersions, facts.APIVersions))
}
