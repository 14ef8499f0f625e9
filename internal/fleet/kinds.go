package fleet

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// kind describes a kind of objects that declare members.
type kind struct {
	schema.GroupVersionKind
	// resource is the plural name in API paths.
	resource  string
	newObject func() client.Object
	newList   func() client.ObjectList
	// key returns the key of the object that declares the member namespace/name. ok is false if no object can declare it.
	key func(namespace, name string) (key types.NamespacedName, ok bool)
	// namespace returns the namespace of the member that a reference names.
	namespace func(ref corev1.ObjectReference) string
	// toMember implements FromObject, and stripVolatile WithoutVolatileFields. Both expect an object of the kind.
	toMember      func(obj client.Object) Member
	stripVolatile func(obj client.Object) client.Object
}

// kinds returns the kinds of objects that declare members.
func kinds() map[Type]kind {
	return map[Type]kind{TypeSveltos: sveltosKind(), TypeKarmada: karmadaKind()}
}

// kindOfType returns the kind of the objects that declare members of a type; ok is false for an unknown type. It builds
// no map, because it is called for each event of a ClusterSummary.
func kindOfType(t Type) (k kind, ok bool) {
	switch t {
	case TypeSveltos:
		return sveltosKind(), true
	case TypeKarmada:
		return karmadaKind(), true
	default:
		return kind{}, false
	}
}

func sveltosKind() kind {
	return kind{
		GroupVersionKind: libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind),
		resource:         "sveltosclusters",
		newObject:        func() client.Object { return &libv1beta1.SveltosCluster{} },
		newList:          func() client.ObjectList { return &libv1beta1.SveltosClusterList{} },
		key: func(namespace, name string) (types.NamespacedName, bool) {
			return types.NamespacedName{Namespace: namespace, Name: name}, true
		},
		namespace:     func(ref corev1.ObjectReference) string { return ref.Namespace },
		toMember:      func(obj client.Object) Member { return FromSveltosCluster(obj.(*libv1beta1.SveltosCluster)) },
		stripVolatile: func(obj client.Object) client.Object { return stripSveltosCluster(obj.(*libv1beta1.SveltosCluster)) },
	}
}

func karmadaKind() kind {
	return kind{
		GroupVersionKind: clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind),
		resource:         "clusters",
		newObject:        func() client.Object { return &clusterv1alpha1.Cluster{} },
		newList:          func() client.ObjectList { return &clusterv1alpha1.ClusterList{} },
		key: func(namespace, name string) (types.NamespacedName, bool) {
			return types.NamespacedName{Name: name}, namespace == ExecutionSpace(name)
		},
		namespace:     func(ref corev1.ObjectReference) string { return ExecutionSpace(ref.Name) },
		toMember:      func(obj client.Object) Member { return FromCluster(obj.(*clusterv1alpha1.Cluster)) },
		stripVolatile: func(obj client.Object) client.Object { return stripCluster(obj.(*clusterv1alpha1.Cluster)) },
	}
}

// NewObjects returns a new, empty object of each kind that declares members, in a constant order.
func NewObjects() []client.Object {
	all := kinds()
	objects := make([]client.Object, 0, len(all))
	for _, t := range slices.Sorted(maps.Keys(all)) {
		objects = append(objects, all[t].newObject())
	}
	return objects
}

// FromObject converts an object that declares a member. It panics for any other object. The Member shares memory with
// obj.
func FromObject(obj client.Object) Member {
	return kindOfObject(obj).toMember(obj)
}

func kindOfObject(obj client.Object) kind {
	switch obj.(type) {
	case *libv1beta1.SveltosCluster:
		return sveltosKind()
	case *clusterv1alpha1.Cluster:
		return karmadaKind()
	default:
		panic(fmt.Sprintf("%T declares no member", obj))
	}
}

// WithoutVolatileFields returns a copy of obj for the data of templates and for the comparison of two versions. The
// copy lacks fields that change often, for example with each heartbeat, and that only their writers need. It has its
// kind and API version, and shares memory with obj: it must not be changed. The function panics if obj does not declare
// a member.
func WithoutVolatileFields(obj client.Object) client.Object {
	return kindOfObject(obj).stripVolatile(obj)
}

// Get returns a member and the object that declares it. They may be from the cache of hub and must not be changed. It
// fails with the API error NotFound if the object does not exist or the type is unknown.
func Get(ctx context.Context, hub client.Reader, memberType Type, namespace, name string) (Member, client.Object, error) {
	obj, err := Object(ctx, hub, ID{Type: memberType, Namespace: namespace, Name: name})
	if err != nil {
		return Member{}, nil, err
	}
	return FromObject(obj), obj, nil
}

// Object is Get without the conversion to a Member.
func Object(ctx context.Context, hub client.Reader, id ID) (client.Object, error) {
	k, ok := kindOfType(id.Type)
	if !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: string(id.Type) + " clusters"}, id.Name)
	}
	key, ok := k.key(id.Namespace, id.Name)
	if !ok {
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: k.Group, Resource: k.resource}, id.Namespace+"/"+id.Name)
	}
	obj := k.newObject()
	// This function is called for each event of a ClusterSummary, so it does not copy the object.
	if err := hub.Get(ctx, key, obj, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("read cluster %s/%s: %w", id.Namespace, id.Name, err)
	}
	return obj, nil
}

// Objects returns the objects that declare members and match options, sorted by type, namespace and name. They may be
// from the cache of hub and must not be changed.
func Objects(ctx context.Context, hub client.Reader, options ...client.ListOption) ([]client.Object, error) {
	var objects []client.Object
	options = append(slices.Clone(options), client.UnsafeDisableDeepCopy) // copies of many clusters need much memory
	all := kinds()
	for _, t := range slices.Sorted(maps.Keys(all)) {
		list := all[t].newList()
		if err := hub.List(ctx, list, options...); err != nil {
			return nil, fmt.Errorf("list clusters of type %s: %w", t, err)
		}
		first := len(objects)
		// The callback returns no error, and the lists have items.
		_ = meta.EachListItem(list, func(obj runtime.Object) error {
			objects = append(objects, obj.(client.Object))
			return nil
		})
		slices.SortFunc(objects[first:], func(a, b client.Object) int {
			return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
		})
	}
	return objects, nil
}

// List returns the members whose objects match options, in the order of Objects. They must not be changed.
func List(ctx context.Context, hub client.Reader, options ...client.ListOption) ([]Member, error) {
	objects, err := Objects(ctx, hub, options...)
	if err != nil {
		return nil, err
	}
	members := make([]Member, 0, len(objects))
	for _, obj := range objects {
		members = append(members, FromObject(obj))
	}
	return members, nil
}

// IDFromReference returns the ID of the member that ref names. ok is false if ref names another kind of object. A
// reference without a kind names a SveltosCluster.
func IDFromReference(ref corev1.ObjectReference) (id ID, ok bool) {
	kindName := cmp.Or(ref.Kind, libv1beta1.SveltosClusterKind)
	version := schema.FromAPIVersionAndKind(ref.APIVersion, kindName)
	for t, k := range kinds() {
		// The API version may be missing for a SveltosCluster, but not for a Cluster: Cluster API has a kind of the same
		// name.
		if k.Kind == kindName && (k.Group == version.Group || t == TypeSveltos && ref.APIVersion == "") {
			return ID{Type: t, Namespace: k.namespace(ref), Name: ref.Name}, true
		}
	}
	return ID{}, false
}

// Reference returns a reference to the object that declares m.
func Reference(m Member) corev1.ObjectReference {
	k, ok := kindOfType(m.Type)
	if !ok {
		return corev1.ObjectReference{Namespace: m.Namespace, Name: m.Name}
	}
	key, _ := k.key(m.Namespace, m.Name)
	return corev1.ObjectReference{APIVersion: k.GroupVersion().String(), Kind: k.Kind, Namespace: key.Namespace, Name: key.Name}
}
