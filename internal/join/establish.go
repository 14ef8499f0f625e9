package join

import (
	"context"
	"errors"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// ErrDeparting says that a cluster is being deregistered, so that nothing is made for it any more.
var ErrDeparting = errors.New("it is being deregistered; wait until that is done")

// Establish makes or repairs what the agent of an existing pull-mode SveltosCluster needs on the hub, and returns its
// delivery namespace: that namespace and the claim to it, ServiceAccount, anchor Secret, Lease, Roles and RoleBindings.
// Where all is well it writes nothing. It refuses, with ErrForeign, an object that exists and was not made by a
// registration, and, with ErrDeparting, a cluster that is being deleted. The registration Secret is not among them: it
// exists only while a manifest is on its way (see Manifests).
func Establish(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster) (delivery string, err error) {
	l := &ledger{hubClient: hub, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
	live, err := l.liveCluster(ctx)
	if err != nil {
		return "", err
	}
	return l.establish(ctx, live)
}

// liveCluster reads the SveltosCluster past any cache: an old copy may lack the delivery namespace that it has by now.
func (l *ledger) liveCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: named(l.request.Namespace, l.request.Name)}
	live, found, err := l.live(ctx, cluster)
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, fmt.Errorf("SveltosCluster %s: %w", l.request.key(), ErrNotRegistered)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, cluster); err != nil {
		return nil, fmt.Errorf("decode SveltosCluster %s: %w", l.request.key(), err)
	}
	return cluster, nil
}

// establish is Establish through a ledger, for a cluster as it is now.
func (l *ledger) establish(ctx context.Context, cluster *libv1beta1.SveltosCluster) (delivery string, err error) {
	if cluster.DeletionTimestamp != nil {
		return "", ErrDeparting
	}
	if delivery, err = l.claimDelivery(ctx, l.request, cluster); err != nil {
		return "", err
	}
	if err := l.noteDelivery(ctx, cluster, delivery); err != nil {
		return "", err
	}
	return delivery, l.makeIdentity(ctx, cluster, delivery)
}

// RestoreDelivery writes onto a SveltosCluster which namespace is claimed for its deliveries, if the annotation that
// says so was lost or changed. Without a claim, or without the SveltosCluster, it does nothing. Unlike Establish it
// makes nothing, so that it can also be called for a cluster that is being deleted.
func RestoreDelivery(ctx context.Context, hub client.Client, cluster *libv1beta1.SveltosCluster) error {
	l := &ledger{hubClient: hub, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
	claimed, err := l.claimedDelivery(ctx, l.request)
	if claimed == "" || err != nil {
		return err
	}
	live, err := l.liveCluster(ctx)
	if errors.Is(err, ErrNotRegistered) {
		return nil
	}
	if err != nil {
		return err
	}
	return l.noteDelivery(ctx, live, claimed)
}

// saysDelivery says whether a SveltosCluster names delivery as the namespace of its deliveries.
func saysDelivery(cluster *libv1beta1.SveltosCluster, delivery string) bool {
	namespace, foreign := fleet.DeliveryNamespace(cluster)
	return namespace == delivery && !foreign
}

// noteDelivery writes the delivery namespace onto the SveltosCluster if that does not say so.
func (l *ledger) noteDelivery(ctx context.Context, cluster *libv1beta1.SveltosCluster, delivery string) error {
	if saysDelivery(cluster, delivery) {
		return nil
	}
	// The hub writes to the SveltosCluster too, from the moment it appears.
	err := kube.RetryOnConflict(ctx, func() error {
		live, err := l.liveCluster(ctx)
		if err != nil {
			return err
		}
		live.DeepCopyInto(cluster)
		if saysDelivery(cluster, delivery) {
			return nil
		}
		metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationDeliveryNS, delivery)
		return l.hubClient.Patch(ctx, cluster, client.MergeFromWithOptions(live, client.MergeFromWithOptimisticLock{}), client.FieldOwner(kube.FieldManager))
	})
	if err != nil {
		return fmt.Errorf("write the delivery namespace of SveltosCluster %s: %w", l.request.key(), err)
	}
	return nil
}

// ownerOf is the reference by which objects belong to a SveltosCluster, and go with it.
func ownerOf(cluster *libv1beta1.SveltosCluster) metav1.OwnerReference {
	return metav1.OwnerReference{
		APIVersion: libv1beta1.GroupVersion.String(), Kind: "SveltosCluster", Name: cluster.Name, UID: cluster.UID,
	}
}

// makeIdentity makes what the agent needs on the hub. What lives beside the SveltosCluster belongs to it, and goes with
// it.
func (l *ledger) makeIdentity(ctx context.Context, cluster *libv1beta1.SveltosCluster, delivery string) error {
	// It is everybody's, as the Role in it is: both stay when a registration is taken back.
	if _, err := l.createNamespace(ctx, kube.AgentNamespace, nil); err != nil {
		return err
	}
	if err := l.makeSharedRole(ctx); err != nil {
		return err
	}
	for _, obj := range identityObjects(l.request, delivery) {
		if obj.GetNamespace() == l.request.Namespace {
			obj.SetOwnerReferences([]metav1.OwnerReference{ownerOf(cluster)})
		}
		write := l.own
		if lease, ok := obj.(*coordinationv1.Lease); ok {
			if err := l.checkLease(ctx, cluster, lease); err != nil {
				return err
			}
			write = l.apply
		}
		if _, err := write(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

// checkLease refuses a Lease that no registration of the cluster made, and deletes one of an earlier cluster of its
// name, which says nothing of this one's agent. desired gets our label: what the agent did to it is repaired.
func (l *ledger) checkLease(ctx context.Context, cluster *libv1beta1.SveltosCluster, desired *coordinationv1.Lease) error {
	desired.Labels = map[string]string{registrationLabel: l.request.Name}
	live, found, err := l.live(ctx, desired)
	if err != nil || !found {
		return err
	}
	if foreign := l.checkOwn(live); foreign != nil {
		if ours, err := agentMayWrite(ctx, l.hubClient, desired); err != nil || !ours {
			return errors.Join(err, foreign)
		}
	}
	made, uid := live.GetCreationTimestamp(), live.GetUID()
	if !made.Before(&cluster.CreationTimestamp) {
		return nil
	}
	if err := l.hubClient.Delete(ctx, live, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", describe(live), err)
	}
	return nil
}

// agentMayWrite says whether lease is the one in its place that the cluster's agent may write: no matter what it says
// of itself then.
func agentMayWrite(ctx context.Context, hub client.Client, lease *coordinationv1.Lease) (bool, error) {
	binding := &rbacv1.RoleBinding{}
	err := hub.Get(ctx, client.ObjectKeyFromObject(lease), binding)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read RoleBinding %s: %w", client.ObjectKeyFromObject(lease), err)
	}
	return err == nil && binding.Labels[registrationLabel] == lease.Name, nil
}

// makeSharedRole makes the Role that is the same for all agents.
func (l *ledger) makeSharedRole(ctx context.Context) error {
	everybodys := &ledger{hubClient: l.hubClient, request: l.request}
	_, err := everybodys.apply(ctx, role(kube.AgentNamespace, sharedRole, sharedRules()))
	return err
}

// makeRegistration makes the registration Secret, or finds it.
func (l *ledger) makeRegistration(ctx context.Context, owner metav1.OwnerReference) (*corev1.Secret, error) {
	desired := &corev1.Secret{ObjectMeta: named(l.request.Namespace, RegistrationSecret(l.request.Name))}
	desired.OwnerReferences = []metav1.OwnerReference{owner}
	live, err := l.own(ctx, desired)
	if err != nil {
		return nil, err
	}
	made := &corev1.Secret{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(live.Object, made); err != nil {
		return nil, fmt.Errorf("decode %s: %w", describe(live), err)
	}
	return made, nil
}

// renewRegistration makes a registration Secret that no agent has exchanged a token of yet: the hub deletes one that an
// agent has, and with it every token that is bound to it.
func (l *ledger) renewRegistration(ctx context.Context, owner metav1.OwnerReference, delivery string) (*corev1.Secret, error) {
	secret, err := l.makeRegistration(ctx, owner)
	if err != nil {
		return nil, err
	}
	spent, err := exchangedSecret(ctx, l.hubClient, client.ObjectKey{Namespace: delivery, Name: l.request.Name})
	if err != nil || spent != secret.UID {
		return secret, err
	}
	if err := l.hubClient.Delete(ctx, secret, client.Preconditions{UID: &spent}); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("delete Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return l.makeRegistration(ctx, owner)
}

// exchangedSecret reads, off an agent's Lease, the uid of the Secret that the token was bound to which the agent
// exchanged last.
func exchangedSecret(ctx context.Context, hubClient client.Client, key client.ObjectKey) (types.UID, error) {
	lease := &coordinationv1.Lease{}
	if err := hubClient.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read Lease %s: %w", key, err)
	}
	return types.UID(lease.Annotations[kube.AnnotationExchanged]), nil
}

// revoke deletes what the tokens of a cluster are bound to, so that all of them are worthless. It is not undone.
func (l *ledger) revoke(ctx context.Context) error {
	r := l.request
	for _, obj := range []client.Object{
		&corev1.Secret{ObjectMeta: named(r.Namespace, AnchorSecret(r.Name))},
		&corev1.Secret{ObjectMeta: named(r.Namespace, RegistrationSecret(r.Name))},
		&corev1.ServiceAccount{ObjectMeta: named(r.Namespace, r.Name)},
	} {
		live, found, err := l.live(ctx, obj)
		if err != nil {
			return err
		}
		if !found {
			continue
		}
		if err := l.checkOwn(live); err != nil {
			return err
		}
		uid := live.GetUID()
		if err := client.IgnoreNotFound(l.hubClient.Delete(ctx, live, client.Preconditions{UID: &uid})); err != nil {
			return fmt.Errorf("delete %s: %w", describe(live), err)
		}
	}
	return nil
}
