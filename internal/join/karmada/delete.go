package karmada

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// DeleteWait is how long a removal is waited for unless a request says otherwise: the default of the Karmada surface.
	DeleteWait = time.Minute
	// forceWait is how long the hub may then take to end it by force. Nothing is withdrawn any more then.
	forceWait = 15 * time.Second
	// deletePoll is the time between two looks at a Cluster that goes.
	deletePoll = 200 * time.Millisecond
)

// ErrNoCluster says that there is no such Cluster.
var ErrNoCluster = errors.New("no cluster object found in karmada control Plane")

// noCluster is the ErrNoCluster of one name, in the words of the Karmada surface.
type noCluster struct{ name string }

func (n noCluster) Error() string {
	return fmt.Sprintf("no cluster object %s found in karmada control Plane", n.name)
}
func (n noCluster) Is(target error) bool { return target == ErrNoCluster }

// DeleteOptions say how a Cluster is deleted.
type DeleteOptions struct {
	// Orphan leaves on the cluster what was propagated to it.
	Orphan bool
	// Force ends the removal when Wait is over, whatever is left behind then, and also where no hub is at work.
	Force bool
	// Wait is how long the hub may take. Zero means DeleteWait.
	Wait time.Duration
	// Progress is told what is waited for; it may be nil.
	Progress func(string)
}

// DeleteCluster deletes the Cluster name, which must be of this mode, and waits until it is gone. The hub withdraws
// meanwhile what was propagated, and takes back the registration. It returns an error that is ErrNoCluster if there is
// none, and one that is context.DeadlineExceeded if it takes too long; the hub goes on then. hub must read from the API
// server.
func DeleteCluster(ctx context.Context, hub client.Client, name string, mode clusterv1alpha1.ClusterSyncMode, o DeleteOptions) error {
	cluster, err := clusterOfMode(ctx, hub, name, mode)
	if err != nil {
		return err
	}
	if o.Wait == 0 {
		o.Wait = DeleteWait
	}
	d := &deletion{hub: hub, cluster: cluster, options: o}
	if err := d.run(ctx); err != nil {
		return fmt.Errorf("delete the cluster object %s: %w", name, err)
	}
	return nil
}

// clusterOfMode reads a Cluster that must be of this mode.
func clusterOfMode(ctx context.Context, hub client.Client, name string, mode clusterv1alpha1.ClusterSyncMode) (*clusterv1alpha1.Cluster, error) {
	cluster := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	if apierrors.IsNotFound(err) {
		return nil, noCluster{name}
	}
	if err != nil {
		return nil, fmt.Errorf("read the cluster object %s: %w", name, err)
	}
	verb := map[clusterv1alpha1.ClusterSyncMode][2]string{
		clusterv1alpha1.Pull: {"unregister", "unregistering"}, clusterv1alpha1.Push: {"unjoin", "unjoining"},
	}[cluster.Spec.SyncMode]
	if cluster.Spec.SyncMode != mode {
		return nil, fmt.Errorf("cluster %s is a %s mode member cluster, please use command `%s` if you want to continue %s the cluster",
			name, cluster.Spec.SyncMode, verb[0], verb[1])
	}
	return cluster, nil
}

// deletion is one run of DeleteCluster.
type deletion struct {
	hub     client.Client
	cluster *clusterv1alpha1.Cluster
	options DeleteOptions
}

func (d *deletion) run(ctx context.Context) error {
	if d.options.Orphan {
		// The hub must know how before it knows that.
		if err := AnnotateDeparture(ctx, d.hub, d.cluster, kube.DeregisterKeep); err != nil {
			return err
		}
	}
	err := d.hub.Delete(ctx, d.cluster.DeepCopy(), client.Preconditions{UID: &d.cluster.UID})
	if client.IgnoreNotFound(err) != nil {
		return err
	}
	gone, err := d.await(ctx, d.options.Wait)
	if err != nil {
		return err
	}
	if gone {
		return d.clear(ctx)
	}
	if !d.options.Force {
		return fmt.Errorf("wait %s for it to be gone: %w; the hub goes on with it", d.options.Wait, context.DeadlineExceeded)
	}
	tell(d.options.Progress, fmt.Sprintf("The cluster object %s is not gone after %s; ending its removal by force", d.cluster.Name, d.options.Wait))
	if err := AnnotateDeparture(ctx, d.hub, d.cluster, kube.DeregisterForce, kube.DeregisterAbandon); err != nil {
		return client.IgnoreNotFound(err)
	}
	if gone, err = d.await(ctx, forceWait); gone || err != nil {
		return err
	}
	if err := d.free(ctx); err != nil {
		return err
	}
	gone, err = d.await(ctx, forceWait)
	if err == nil && !gone {
		return fmt.Errorf("wait %s for it to be gone: %w", forceWait, context.DeadlineExceeded)
	}
	return err
}

// clear deletes what the control plane has of a Cluster that no hub has looked after, as far as this one may.
func (d *deletion) clear(ctx context.Context) error {
	if controllerutil.ContainsFinalizer(d.cluster, clusterv1alpha1.ClusterFinalizer) {
		return nil
	}
	return allowed(removeRemains(ctx, d.hub, d.cluster))
}

// await waits until the Cluster is gone, and says whether it is.
func (d *deletion) await(ctx context.Context, limit time.Duration) (gone bool, err error) {
	told := false
	var failure error
	// The requests have the whole of ctx: one that would be cut off by the limit fails in other words.
	err = wait.PollUntilContextTimeout(ctx, deletePoll, limit, true, func(context.Context) (bool, error) {
		live := &clusterv1alpha1.Cluster{}
		err := d.hub.Get(ctx, client.ObjectKeyFromObject(d.cluster), live)
		// Whoever could read it and no longer can is its agent, whose rights go right after it.
		gone = apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || err == nil && live.UID != d.cluster.UID
		if gone {
			failure = nil
			return true, nil
		}
		if err != nil {
			// A hub that does not answer for a moment is waited for, too.
			failure = fmt.Errorf("read it: %w", err)
			return false, nil
		}
		failure = nil
		if !told {
			tell(d.options.Progress, fmt.Sprintf("Waiting for the cluster object %s to be deleted", d.cluster.Name))
			told = true
		}
		return false, nil
	})
	if ctx.Err() != nil {
		return gone, ctx.Err()
	}
	if wait.Interrupted(err) {
		err = nil
	}
	return gone, errors.Join(err, failure)
}

// AnnotateDeparture adds to how cluster is removed, which the hub follows once it is being deleted. cluster becomes
// what it is then.
func AnnotateDeparture(ctx context.Context, hub client.Client, cluster *clusterv1alpha1.Cluster, options ...string) error {
	have := strings.FieldsFunc(cluster.Annotations[kube.AnnotationDeregister], func(r rune) bool { return r == ',' })
	wanted := map[string]bool{}
	for _, option := range slices.Concat(have, options) {
		wanted[option] = true
	}
	text := strings.Join(slices.Sorted(maps.Keys(wanted)), ",")
	if text == cluster.Annotations[kube.AnnotationDeregister] {
		return nil
	}
	before := cluster.DeepCopy()
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationDeregister, text)
	if err := hub.Patch(ctx, cluster, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("say how cluster %s is removed: %w", cluster.Name, err)
	}
	return nil
}

func tell(progress func(string), what string) {
	if progress != nil {
		progress(what)
	}
}
