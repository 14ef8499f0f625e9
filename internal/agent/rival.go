package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

const (
	// rivalSilence is how long another cluster must have been silent until this one takes its registration over: three
	// missed heartbeats, after which the hub calls it Down, too.
	rivalSilence = 90 * time.Second
	// enterLook is the time between two looks at what keeps the agent from working for the hub, and refusedRetry that
	// between two attempts with a credential that the hub refused.
	enterLook    = 5 * time.Second
	refusedRetry = 30 * time.Second
)

var (
	// errRival says that another cluster works under this one's registration.
	errRival = errors.New("another cluster works under this registration")
	// errDisplaced says that another cluster took the registration over, since this one had been silent.
	errDisplaced = errors.New("another cluster took the registration over")
)

// rival is another cluster that works under the same registration, as far as the Lease tells of it.
type rival struct {
	clock clock.PassiveClock
	// member and beat are its heartbeat as it was last seen, and heard is when it was given, by this cluster's clock.
	member string
	beat   time.Time
	heard  time.Time
	// said is when people were last told of it.
	said time.Time
}

// silent says whether the cluster that lease belongs to has given up its heartbeat. The clocks of clusters need not
// agree: what counts is when a heartbeat was seen, and the time in it only for the first.
func (r *rival) silent(lease *coordinationv1.Lease) bool {
	now, member := r.clock.Now(), lease.Annotations[kube.AnnotationMember]
	var beat time.Time
	if lease.Spec.RenewTime != nil {
		beat = lease.Spec.RenewTime.Time
	}
	switch {
	case r.member != member:
		r.member, r.beat, r.heard = member, beat, beat
		if beat.After(now) {
			r.heard = now
		}
	case !r.beat.Equal(beat):
		r.beat, r.heard = beat, now
	}
	return now.Sub(r.heard) >= rivalSilence
}

// tell says what is wrong, now and then.
func (r *rival) tell(ctx context.Context, cluster types.NamespacedName) {
	now := r.clock.Now()
	if !r.said.IsZero() && now.Sub(r.said) < session.LogInterval {
		return
	}
	r.said = now
	log.FromContext(ctx).Error(nil, "another cluster works under this cluster's registration: this one waits, and deploys nothing until the other is silent for 90s",
		"registration", cluster.String(), "otherMember", r.member,
		"repair", fmt.Sprintf("give this cluster a registration of its own: with the hub's kubeconfig run: "+
			"sveltosctl register cluster --namespace=%s --cluster=ANOTHER-NAME --pullmode > registration.yaml; "+
			"then with this cluster's kubeconfig run: kubectl apply -f registration.yaml", cluster.Namespace))
}

// enter waits until the agent may work for the hub: the hub accepts its credential, and no other cluster works under
// the registration. It returns join.ErrSuperseded when there is another registration meanwhile.
func (a *agent) enter(ctx context.Context, credential *join.Credential, link *link) error {
	other := &rival{clock: a.opts.Clock}
	for {
		err := link.claim(ctx, other)
		if err == nil {
			a.refusal.Reset()
			return nil
		}
		a.metrics.RecordHeartbeat(err)
		pause := refusedRetry
		if errors.Is(err, errRival) {
			a.refusal.Reset()
			other.tell(ctx, a.cluster())
			pause = enterLook
		} else if !a.refusal.LogIfRejected(ctx, err) {
			return err
		}
		if err := a.rest(ctx, credential, pause); err != nil {
			return err
		}
	}
}

// rest waits, and returns an error when there is nothing more to wait for.
func (a *agent) rest(ctx context.Context, credential *join.Credential, pause time.Duration) error {
	for end := a.opts.Clock.Now().Add(pause); a.opts.Clock.Now().Before(end); {
		a.metrics.Watchdog.Reset()
		if !session.Sleep(ctx, a.opts.Clock, enterLook) {
			return ctx.Err()
		}
		if credential.Superseded(ctx) {
			return join.ErrSuperseded
		}
	}
	return nil
}

// memberUID tells the cluster that the agent runs in from all others.
func (a *agent) memberUID(ctx context.Context) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	namespace, err := a.namespaces.Get(ctx, metav1.NamespaceSystem, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	return namespace.UID, nil
}

// claim makes the Lease this member's. It returns errRival if another one works under it.
func (l *link) claim(ctx context.Context, other *rival) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	lease := &coordinationv1.Lease{}
	err := l.hub.Get(ctx, l.lease, lease)
	if apierrors.IsNotFound(err) {
		// Nobody works under it. The heartbeat says so until the hub has made it again.
		return nil
	}
	if err != nil {
		return fmt.Errorf("read Lease %s: %w", l.lease, err)
	}
	switch holder := lease.Annotations[kube.AnnotationMember]; {
	case holder == string(l.member):
		return nil
	case holder != "" && !other.silent(lease):
		return errRival
	case holder != "":
		log.FromContext(ctx).Info("taking the registration over from a cluster that is silent", "otherMember", holder)
	}
	// If another one is faster this fails.
	_, err = l.writeLease(ctx, lease.ResourceVersion)
	return err
}
