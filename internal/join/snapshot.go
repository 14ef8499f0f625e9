package join

import (
	"context"
	"fmt"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// snapshotPage is the maximum number of objects in one response.
const snapshotPage = 500

// Snapshot has the ServiceAccounts, Roles and RoleBindings of all registrations at one moment. With it, the hub skips
// Establish for clusters whose objects do not have to change, and sends no requests for them.
type Snapshot struct {
	objects map[snapshotKey]client.Object
}

type snapshotKey struct {
	kind string // the Go type of the object
	name client.ObjectKey
}

// TakeSnapshot lists the objects. hub must read from the API server.
func TakeSnapshot(ctx context.Context, hub client.Reader) (*Snapshot, error) {
	s := &Snapshot{objects: map[snapshotKey]client.Object{}}
	for _, newList := range []func() client.ObjectList{
		func() client.ObjectList { return &corev1.ServiceAccountList{} },
		func() client.ObjectList { return &rbacv1.RoleList{} },
		func() client.ObjectList { return &rbacv1.RoleBindingList{} },
	} {
		if err := s.addAll(ctx, hub, newList); err != nil {
			return nil, fmt.Errorf("list the objects of registrations: %w", err)
		}
	}
	// This Role belongs to no cluster, and has no label.
	shared := &rbacv1.Role{}
	found, err := read(ctx, hub, shared, client.ObjectKey{Namespace: kube.AgentNamespace, Name: sharedRole})
	if found {
		s.add(shared)
	}
	return s, err
}

func (s *Snapshot) addAll(ctx context.Context, hub client.Reader, newList func() client.ObjectList) error {
	for page := ""; ; {
		list := newList()
		if err := hub.List(ctx, list, client.HasLabels{registrationLabel}, client.Limit(snapshotPage), client.Continue(page)); err != nil {
			return err
		}
		err := meta.EachListItem(list, func(item runtime.Object) error {
			s.add(item.(client.Object))
			return nil
		})
		if page = list.GetContinue(); page == "" || err != nil {
			return err
		}
	}
}

func (s *Snapshot) add(obj client.Object) {
	obj.SetManagedFields(nil)
	s.objects[keyOf(obj)] = obj
}

func keyOf(obj client.Object) snapshotKey {
	return snapshotKey{fmt.Sprintf("%T", obj), client.ObjectKeyFromObject(obj)}
}

// FindEstablished returns the delivery namespace of a pull-mode SveltosCluster, or "" if Establish might change an
// object. cache reads Leases, and the metadata of Secrets and namespaces. FindEstablished does not see changes that are
// later than the Snapshot or the cache.
func (s *Snapshot) FindEstablished(ctx context.Context, cache client.Reader, cluster *libv1beta1.SveltosCluster) (delivery string, err error) {
	if cluster.DeletionTimestamp != nil {
		return "", nil
	}
	r := &registration{cache: cache, request: Request{Namespace: cluster.Namespace, Name: cluster.Name}}
	if delivery, err = r.claimedDeliveryNamespace(ctx, cache); delivery == "" || err != nil {
		return "", err
	}
	if annotated, isForeign := fleet.DeliveryNamespace(cluster); annotated != delivery || isForeign {
		return "", nil
	}
	agents := newPartialMetadata("Namespace")
	found, err := read(ctx, cache, agents, client.ObjectKey{Name: kube.AgentNamespace})
	if !found || err != nil || agents.DeletionTimestamp != nil {
		return "", err
	}
	for _, desired := range append(agentIdentity(r.request, cluster, delivery), desiredSharedRole()) {
		isUnchanged, err := s.isUnchanged(ctx, cache, desired)
		if !isUnchanged || err != nil {
			return "", err
		}
	}
	return delivery, nil
}

func (s *Snapshot) isUnchanged(ctx context.Context, cache client.Reader, desired client.Object) (bool, error) {
	var existing client.Object
	switch desired.(type) {
	case *corev1.Secret:
		existing = newPartialMetadata("Secret") // the anchor Secret has no data
	case *coordinationv1.Lease:
		existing = &coordinationv1.Lease{}
	default:
		listed, found := s.objects[keyOf(desired)]
		return found && rollback.IsUnchanged(kube.Scheme(), listed, desired), nil
	}
	found, err := read(ctx, cache, existing, client.ObjectKeyFromObject(desired))
	return found && rollback.IsUnchanged(kube.Scheme(), existing, desired), err
}
