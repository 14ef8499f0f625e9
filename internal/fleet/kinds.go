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

// kind is one kind of objects that declare members.
type kind struct {
	schema.GroupVersionKind
	// resource is the plural in its API's paths.
	resource string
	blank    func() client.Object
	list     func() client.ObjectList
	// at says where the object of a member is; ok is false if none can declare that member.
	at func(namespace, name string) (key types.NamespacedName, ok bool)
	// namespace is that of the member which a reference to an object names.
	namespace func(ref corev1.ObjectReference) string
	// has says whether obj is of the kind; member and settled expect one that is.
	has     func(obj client.Object) bool
	member  func(obj client.Object) Member
	settled func(obj client.Object) client.Object
}

// kinds has every kind of objects that declare members.
func kinds() map[Type]kind {
	return map[Type]kind{
		TypeSveltos: {
			GroupVersionKind: libv1beta1.GroupVersion.WithKind(libv1beta1.SveltosClusterKind),
			resource:         "sveltosclusters",
			blank:            func() client.Object { return &libv1beta1.SveltosCluster{} },
			list:             func() client.ObjectList { return &libv1beta1.SveltosClusterList{} },
			at: func(namespace, name string) (types.NamespacedName, bool) {
				return types.NamespacedName{Namespace: namespace, Name: name}, true
			},
			namespace: func(ref corev1.ObjectReference) string { return ref.Namespace },
			has:       is[*libv1beta1.SveltosCluster],
			member:    func(obj client.Object) Member { return FromSveltosCluster(obj.(*libv1beta1.SveltosCluster)) },
			settled:   func(obj client.Object) client.Object { return settledSveltosCluster(obj.(*libv1beta1.SveltosCluster)) },
		},
		TypeKarmada: {
			GroupVersionKind: clusterv1alpha1.GroupVersion.WithKind(clusterv1alpha1.ClusterKind),
			resource:         "clusters",
			blank:            func() client.Object { return &clusterv1alpha1.Cluster{} },
			list:             func() client.ObjectList { return &clusterv1alpha1.ClusterList{} },
			at: func(namespace, name string) (types.NamespacedName, bool) {
				return types.NamespacedName{Name: name}, namespace == ExecutionSpace(name)
			},
			namespace: func(ref corev1.ObjectReference) string { return ExecutionSpace(ref.Name) },
			has:       is[*clusterv1alpha1.Cluster],
			member:    func(obj client.Object) Member { return FromCluster(obj.(*clusterv1alpha1.Cluster)) },
			settled:   func(obj client.Object) client.Object { return settledCluster(obj.(*clusterv1alpha1.Cluster)) },
		},
	}
}

// is says whether obj is a T.
func is[T client.Object](obj client.Object) bool {
	_, ok := obj.(T)
	return ok
}

// Kinds returns one blank object of every kind that declares members, always in the same order.
func Kinds() []client.Object {
	all := kinds()
	blanks := make([]client.Object, 0, len(all))
	for _, t := range slices.Sorted(maps.Keys(all)) {
		blanks = append(blanks, all[t].blank())
	}
	return blanks
}

// Of reads the object that declares a member. Any other object is a programmer's error, at which it panics. The Member shares memory with obj.
func Of(obj client.Object) Member {
	return kindOf(obj).member(obj)
}

func kindOf(obj client.Object) kind {
	for _, k := range kinds() {
		if k.has(obj) {
			return k
		}
	}
	panic(fmt.Sprintf("%T declares no member", obj))
}

// Settled returns obj, which declares a member, without what changes all the time and matters to nobody but those who look at it. It has its
// kind and API version, and shares memory with obj, so that it must not be changed. It panics where Of does.
func Settled(obj client.Object) client.Object {
	return kindOf(obj).settled(obj)
}

// Get reads the member and the object that declares it. It fails with a NotFound of the API if there is none, which is so for every type that
// is no type of members.
func Get(ctx context.Context, hub client.Reader, of Type, namespace, name string) (Member, client.Object, error) {
	k, known := kinds()[of]
	if !known {
		return Member{}, nil, apierrors.NewNotFound(schema.GroupResource{Resource: string(of) + " clusters"}, name)
	}
	at, possible := k.at(namespace, name)
	if !possible {
		return Member{}, nil, apierrors.NewNotFound(schema.GroupResource{Group: k.Group, Resource: k.resource}, namespace+"/"+name)
	}
	obj := k.blank()
	if err := hub.Get(ctx, at, obj); err != nil {
		return Member{}, nil, fmt.Errorf("read cluster %s/%s: %w", namespace, name, err)
	}
	return k.member(obj), obj, nil
}

// Objects returns all objects that declare members, sorted by type, namespace and name. They may be those of hub's cache, and must not be changed.
func Objects(ctx context.Context, hub client.Reader) ([]client.Object, error) {
	var objects []client.Object
	all := kinds()
	for _, t := range slices.Sorted(maps.Keys(all)) {
		list := all[t].list()
		// There may be many.
		if err := hub.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("list clusters of type %s: %w", t, err)
		}
		from := len(objects)
		// The callback returns no error, and the lists are ours.
		_ = meta.EachListItem(list, func(obj runtime.Object) error {
			objects = append(objects, obj.(client.Object))
			return nil
		})
		slices.SortFunc(objects[from:], func(a, b client.Object) int {
			return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
		})
	}
	return objects, nil
}

// List returns all members, in the order of Objects. They must not be changed.
func List(ctx context.Context, hub client.Reader) ([]Member, error) {
	objects, err := Objects(ctx, hub)
	if err != nil {
		return nil, err
	}
	members := make([]Member, 0, len(objects))
	for _, obj := range objects {
		members = append(members, Of(obj))
	}
	return members, nil
}

// Named returns which member ref names; ok is false if it names something of another kind. Without a kind it names a SveltosCluster.
func Named(ref corev1.ObjectReference) (id ID, ok bool) {
	kindName := cmp.Or(ref.Kind, libv1beta1.SveltosClusterKind)
	version := schema.FromAPIVersionAndKind(ref.APIVersion, kindName)
	for t, k := range kinds() {
		// A SveltosCluster needs no API version. A Cluster does: that of Cluster API is another kind.
		if k.Kind == kindName && (k.Group == version.Group || t == TypeSveltos && ref.APIVersion == "") {
			return ID{Type: t, Namespace: k.namespace(ref), Name: ref.Name}, true
		}
	}
	return ID{}, false
}

// Reference names the object that declares m.
func Reference(m Member) corev1.ObjectReference {
	k, known := kinds()[m.Type]
	if !known {
		return corev1.ObjectReference{Namespace: m.Namespace, Name: m.Name}
	}
	at, _ := k.at(m.Namespace, m.Name)
	return corev1.ObjectReference{APIVersion: k.GroupVersion().String(), Kind: k.Kind, Namespace: at.Namespace, Name: at.Name}
}
