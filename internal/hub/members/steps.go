package members

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/heartbeats"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/survey"
)

// dialLimit is how long it may take to find out how a member is dialled.
const dialLimit = 5 * time.Second

// state is what the steps of one reconcile know.
type state struct {
	cluster *clusterv1alpha1.Cluster
	member  fleet.Member
	// status is what the Cluster shall have.
	status clusterv1alpha1.ClusterStatus
	// incomplete is why the spec could not be completed, nil if it could.
	incomplete error
	// next is when to look again if nothing happens until then; zero means never.
	next time.Duration
}

// ask finds out how the member is, each mode in its own way.
func (c *Controller) ask(ctx context.Context, s *state) error {
	return map[fleet.Mode]func(context.Context, *state) error{fleet.Push: c.observe, fleet.Pull: c.listen}[s.member.Mode](ctx, s)
}

// observe asks a push member. That it does not answer is a finding, not an error.
func (c *Controller) observe(ctx context.Context, s *state) error {
	s.next = wait.Jitter(observeInterval, observeJitter)
	observer, err := c.observer(ctx, s)
	if err != nil {
		if ctx.Err() != nil || passes(err) {
			return err
		}
		if apierrors.IsNotFound(err) && karmada.IsRegistering(s.cluster) {
			s.status = unregistered(s.cluster.Status, c.Clock.Now())
			return nil
		}
		c.count(s.cluster.Name, func(before int) int { return before + 1 })
		s.status = unasked(s.cluster.Status, err, c.Clock.Now())
		return nil
	}
	found := observer.Observe(ctx, s.cluster.Status, s.cluster.Spec.ResourceModels)
	if ctx.Err() != nil {
		return fmt.Errorf("ask %s how it is: %w", s.member.Name, ctx.Err())
	}
	c.count(s.cluster.Name, func(before int) int {
		if observer.Failures() == 0 {
			return 0
		}
		return before + 1
	})
	// That may have taken seconds. Whoever took the Cluster out of our hands meanwhile has its word, and nobody else's is
	// overwritten.
	latest := &clusterv1alpha1.Cluster{}
	if err := c.Hub.Get(ctx, client.ObjectKeyFromObject(s.cluster), latest); err != nil {
		return fmt.Errorf("read cluster %s: %w", s.member.Name, err)
	}
	if latest.UID != s.cluster.UID || latest.Spec.SyncMode != s.cluster.Spec.SyncMode || fleet.FromCluster(latest).Refused != "" {
		return phase.Wait{After: conflictPause, Reason: "the cluster is another one now"}
	}
	s.cluster, s.member, s.status = latest, fleet.FromCluster(latest), found
	return nil
}

// passes says whether it is the hub that kept us from dialling a member, which says nothing of the member.
func passes(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, context.DeadlineExceeded) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsTooManyRequests(err) || apierrors.IsInternalError(err) || apierrors.IsServiceUnavailable(err)
}

// listen judges a pull member by the heartbeats of its agent. It takes no request of the API server unless one is
// missing.
func (c *Controller) listen(ctx context.Context, s *state) error {
	c.observers.drop(s.member.Name)
	liveness, err := c.Heartbeats.Evaluate(ctx, s.member, reportMark(s.cluster.Status))
	if err != nil {
		return err
	}
	if ready := readyOf(s.cluster.Status); ready == nil || ready.Status == metav1.ConditionUnknown {
		// It was never reported on, or its agent is known to be silent: only a report of the agent ends that.
		return nil
	}
	if liveness.State == heartbeats.Silent {
		s.status = silent(s.cluster.Status, c.Clock.Now())
		return nil
	}
	s.next = liveness.Remaining
	return nil
}

// report writes the status, if it differs, and tells what changed.
func (c *Controller) report(ctx context.Context, s *state) error {
	before := s.cluster.Status
	if equality.Semantic.DeepEqual(before, s.status) {
		c.tell(s, before)
		return nil
	}
	written := s.cluster.DeepCopy()
	written.Status = s.status
	// With a lock: the list of conditions is written as a whole, and an agent, or whoever refuses the Cluster, may be
	// writing its own.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Status().Patch(ctx, written, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return retried(fmt.Errorf("report on cluster %s: %w", s.member.Name, err))
	}
	s.cluster = written
	c.tell(s, before)
	return nil
}

// complete writes what people leave out of the spec, or say in an old way. It comes before the first word on the
// cluster, so that nobody renders for a spec that is another one a moment later. That it is refused keeps nobody from
// asking the cluster.
func (c *Controller) complete(ctx context.Context, s *state) error {
	err := c.write(ctx, s, func(spec *clusterv1alpha1.ClusterSpec) {
		if len(spec.ResourceModels) == 0 {
			spec.ResourceModels = survey.DefaultResourceModels()
		}
		if spec.Zone != "" {
			spec.Zones, spec.Zone = []string{spec.Zone}, ""
		}
	})
	var conflict phase.Wait
	if errors.As(err, &conflict) || apierrors.IsNotFound(err) {
		return err
	}
	s.incomplete = err
	return nil
}

// mark writes the taints that follow from the status.
func (c *Controller) mark(ctx context.Context, s *state) error {
	return c.write(ctx, s, func(spec *clusterv1alpha1.ClusterSpec) {
		spec.Taints = tainted(spec.Taints, readyOf(s.cluster.Status), c.Clock.Now())
	})
}

// write changes the spec of a Cluster that is to stay.
func (c *Controller) write(ctx context.Context, s *state, change func(*clusterv1alpha1.ClusterSpec)) error {
	if s.member.Deleting {
		return nil
	}
	changed := s.cluster.DeepCopy()
	change(&changed.Spec)
	if equality.Semantic.DeepEqual(s.cluster.Spec, changed.Spec) {
		return nil
	}
	// With a lock: people write taints, too, and each list is written as a whole.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return retried(fmt.Errorf("write the spec of cluster %s: %w", s.member.Name, err))
	}
	s.cluster = changed
	return nil
}

// retried makes a conflict end in another try.
func retried(err error) error {
	if apierrors.IsConflict(err) {
		return phase.Wait{After: conflictPause, Reason: err.Error()}
	}
	return err
}

// tell records what became of the condition Ready. Of a Cluster that is being removed, which stops answering sooner or
// later, the removal tells.
func (c *Controller) tell(s *state, before clusterv1alpha1.ClusterStatus) {
	ready := readyOf(s.status)
	was, known := c.retell(s.cluster.Name, wordOf(ready))
	if !known {
		was = wordOf(readyOf(before))
	}
	if ready == nil || was == wordOf(ready) || s.member.Deleting || ready.Reason == clusterv1alpha1.ReasonRegistrationNotFinished {
		return
	}
	if ready.Status == metav1.ConditionTrue {
		c.Events.Eventf(s.cluster, nil, corev1.EventTypeNormal, ready.Reason, clusterv1alpha1.ClusterKind, "cluster %s is ready, Kubernetes %s",
			s.cluster.Name, s.status.KubernetesVersion)
		return
	}
	c.Events.Eventf(s.cluster, nil, corev1.EventTypeWarning, ready.Reason, clusterv1alpha1.ClusterKind, "cluster %s: %s", s.cluster.Name, ready.Message)
}

// retell remembers what is told of a Cluster now, and returns what was told last.
func (c *Controller) retell(name, word string) (was string, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.told == nil {
		c.told = map[string]string{}
	}
	was, known = c.told[name]
	c.told[name] = word
	return was, known
}

// wordOf is what events tell of a condition.
func wordOf(ready *metav1.Condition) string {
	if ready == nil {
		return ""
	}
	return string(ready.Status) + "/" + ready.Reason
}
