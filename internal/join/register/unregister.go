package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

const (
	// DefaultWait is how long the control plane may take to let a cluster go.
	DefaultWait = time.Minute
	// cleanLimit is how long it may take after that to remove from the cluster what the registration made: an agent that
	// hangs, and about ten requests.
	cleanLimit = podsLimit + 20*time.Second
	// leavingAnnotation on the Secret names the Cluster, by its uid, that somebody has asked to unregister. The agent has
	// no rights any more when that is done, so that a later run could not ask what became of it.
	leavingAnnotation = "towline.dev/unregistering"
	// departingAnnotation is what an agent writes there that the control plane has ordered to go.
	departingAnnotation = "towline.dev/departing"
)

// UnregisterRequest asks to take a cluster out of the fleet that is in it in pull mode.
type UnregisterRequest struct {
	// Member is the way to the cluster. Hub is the way to the control plane; nil takes that of the agent, and its
	// identity.
	Member, Hub *rest.Config
	// ClusterName is the name of the Cluster.
	ClusterName string
	// Namespace is that of the agent on the cluster, AgentName the name of its Deployment there. Defaults:
	// DefaultNamespace, DefaultAgentName.
	Namespace, AgentName string
	// ClusterNamespace is the namespace on the cluster that the agent keeps its records in, if the agent is not there to
	// say so itself. Default: fleet.DefaultClusterNamespace.
	ClusterNamespace string
	// Wait is how long it may take until the Cluster is gone from the control plane. Default: DefaultWait.
	Wait time.Duration
	// DryRun only looks. Orphan leaves on the cluster what was propagated to it; only an administrator of the control
	// plane may ask for that.
	DryRun, Orphan bool
	// Progress is told what is done and waited for.
	Progress func(line string)
}

func (r UnregisterRequest) withDefaults() (UnregisterRequest, error) {
	if r.Wait < 0 {
		return r, fmt.Errorf(" --wait %v  must be a positive duration, e.g. 1m0s ", r.Wait)
	}
	r.Wait = cmp.Or(r.Wait, DefaultWait)
	r.Namespace = cmp.Or(r.Namespace, DefaultNamespace)
	r.AgentName = cmp.Or(r.AgentName, DefaultAgentName)
	r.ClusterNamespace = cmp.Or(r.ClusterNamespace, fleet.DefaultClusterNamespace)
	if r.Progress == nil {
		r.Progress = func(string) {}
	}
	if r.Member == nil {
		return r, errors.New("the way to the cluster is not given")
	}
	return r, errors.Join(karmada.ValidateName(r.ClusterName), checkNamespace("--namespace", r.Namespace), checkNamespace("--cluster-namespace", r.ClusterNamespace))
}

// Unregister takes a cluster out of the fleet: it has the control plane withdraw what was propagated and delete the
// Cluster, and then removes from the cluster what its registration made there. It can be repeated, also after it was
// interrupted. A Cluster that the control plane does not have is an error, unless there was something left to remove.
// Nothing is removed from the cluster as long as the control plane may still have the Cluster.
func Unregister(ctx context.Context, request UnregisterRequest) error {
	request, err := request.withDefaults()
	if err != nil {
		return err
	}
	m, err := newMember(ctx, request.Member)
	if err != nil {
		return err
	}
	u := &unregistration{request: request, member: m}
	if err := u.leave(ctx); err != nil || request.DryRun {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, cleanLimit, fmt.Errorf("it took longer than %s to clean the cluster", cleanLimit))
	defer cancel()
	return because(ctx, u.clean(ctx))
}

// because returns err with the reason why ctx ended, if it did.
func because(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// unregistration is one run of Unregister.
type unregistration struct {
	request UnregisterRequest
	member  member
	// there is what the cluster holds of the agent.
	there resident
}

// errUnsure says that the control plane may still have the Cluster.
var errUnsure = errors.New("give the way to the control plane with --karmada-config")

// leave has the control plane delete the Cluster, and waits until it is gone. Without an error the cluster is to be
// cleaned then.
func (u *unregistration) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, u.request.Wait, fmt.Errorf("it took longer than %s", u.request.Wait))
	defer cancel()
	return because(ctx, u.delete(ctx))
}

func (u *unregistration) delete(ctx context.Context) error {
	r := u.request
	there, err := u.member.resident(ctx, r.Namespace, r.AgentName)
	if silent(err) {
		return fmt.Errorf("%w; a cluster that is gone for good is taken out on the control plane, by `kubectl delete cluster %s`", err, r.ClusterName)
	}
	if err != nil {
		return err
	}
	if name := there.cluster(); name != "" && name != r.ClusterName {
		if r.Hub == nil {
			return fmt.Errorf("the agent in namespace %s of the cluster is that of Cluster %s, and not of %s", r.Namespace, name, r.ClusterName)
		}
		// What is there is somebody else's.
		there = resident{namespace: r.Namespace}
	}
	u.there = there
	u.request.ClusterNamespace = cmp.Or(there.argument(recordsFlag), r.ClusterNamespace)
	hub, err := u.hub(ctx)
	if err != nil {
		return err
	}
	cluster, err := u.look(ctx, hub)
	if err != nil {
		return err
	}
	if cluster == nil {
		return u.missing()
	}
	if err := u.check(ctx, cluster); err != nil || r.DryRun {
		return err
	}
	if err := u.noteLeaving(ctx, cluster); err != nil {
		return err
	}
	err = karmada.DeleteCluster(ctx, hub, r.ClusterName, clusterv1alpha1.Pull, karmada.DeleteOptions{Orphan: r.Orphan, Wait: r.Wait, Progress: r.Progress})
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w; the control plane goes on with it, and the command can be run again", err)
	case err != nil && !errors.Is(err, karmada.ErrNoCluster):
		return err
	}
	// Or somebody else was faster.
	r.Progress(fmt.Sprintf("Successfully delete cluster object (%s) from control plane.", r.ClusterName))
	return nil
}

// silent says that a cluster gave no answer, and nobody has given up on it.
func silent(err error) bool {
	return err != nil && apierrors.ReasonForError(err) == metav1.StatusReasonUnknown && !errors.Is(err, context.Canceled)
}

// hub connects to the control plane: as who called, or else as the agent.
func (u *unregistration) hub(ctx context.Context) (client.Client, error) {
	config := u.request.Hub
	if config == nil {
		secret := u.there.secret
		if secret == nil {
			return nil, fmt.Errorf("there is no Secret %s on the cluster that leads to the control plane: %w", u.there.secretKey(), errUnsure)
		}
		if u.request.Orphan {
			return nil, fmt.Errorf("the agent itself may not ask for --orphan: %w", errUnsure)
		}
		var err error
		if config, err = clientcmd.RESTConfigFromKubeConfig(secret.Data[KubeconfigKey]); err != nil {
			return nil, fmt.Errorf("the kubeconfig in Secret %s on the cluster cannot be used (%w): %w", u.there.secretKey(), err, errUnsure)
		}
	}
	hub, err := connect(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect to the control plane: %w", err)
	}
	return hub, nil
}

// look reads the Cluster; nil means that the control plane does not have it, for sure.
func (u *unregistration) look(ctx context.Context, hub client.Client) (*clusterv1alpha1.Cluster, error) {
	name := u.request.ClusterName
	cluster := &clusterv1alpha1.Cluster{}
	err := hub.Get(ctx, client.ObjectKey{Name: name}, cluster)
	own := u.request.Hub == nil
	switch {
	case err == nil && cluster.Spec.SyncMode == clusterv1alpha1.Push:
		return nil, fmt.Errorf("cluster %s is a Push mode member cluster, please use command `unjoin` if you want to continue unjoining the cluster", name)
	case err == nil:
		return cluster, nil
	case apierrors.IsNotFound(err):
		return nil, nil //nolint:nilnil // none is an answer
	case own && apierrors.IsForbidden(err) && u.leaving():
		// The agent's rights go with its Cluster, which somebody has asked to delete.
		return nil, nil //nolint:nilnil // as above
	case own && (apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)):
		return nil, fmt.Errorf("the control plane does not let the agent of cluster %s in any more (%w): %w", name, err, errUnsure)
	}
	return nil, fmt.Errorf("read Cluster %s on the control plane: %w", name, err)
}

// leaving says that the Cluster was about to be deleted.
func (u *unregistration) leaving() bool {
	annotations := u.there.secret.Annotations
	return annotations[leavingAnnotation] != "" || annotations[departingAnnotation] != ""
}

// check refuses a Cluster that is another one than the cluster here.
func (u *unregistration) check(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	id, err := u.member.id(ctx)
	if err != nil {
		return err
	}
	if cluster.Spec.ID != "" && cluster.Spec.ID != id {
		return fmt.Errorf("the Cluster %s is another cluster than that of --cluster-kubeconfig: its ID is %s, and here it is %s", cluster.Name, cluster.Spec.ID, id)
	}
	return nil
}

// noteLeaving notes on the cluster what is about to be deleted.
func (u *unregistration) noteLeaving(ctx context.Context, cluster *clusterv1alpha1.Cluster) error {
	if u.there.secret == nil || u.there.secret.Annotations[leavingAnnotation] == string(cluster.UID) {
		return nil
	}
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, leavingAnnotation, cluster.UID))
	err := u.member.Patch(ctx, u.there.secret.DeepCopy(), patch, client.FieldOwner(kube.FieldManager))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("note on the cluster that it is being unregistered: %w", err)
	}
	return nil
}

// missing is the error that the control plane does not know the Cluster, unless something is left of its registration
// on the cluster.
func (u *unregistration) missing() error {
	missing := fmt.Errorf("no cluster object %s found in karmada control Plane", u.request.ClusterName)
	if u.there.empty() {
		return missing
	}
	u.request.Progress(missing.Error() + "; what is left of its registration on the cluster is to be removed")
	return nil
}
