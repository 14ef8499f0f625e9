package kube

import (
	"cmp"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Ref identifies one object of one cluster. Namespace is empty for cluster-scoped kinds.
type Ref struct {
	Group     string `json:"group,omitempty"`
	Version   string `json:"version"`
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
}

// RefOf returns the Ref of obj.
func RefOf(obj *unstructured.Unstructured) Ref {
	gvk := obj.GroupVersionKind()
	return Ref{Group: gvk.Group, Version: gvk.Version, Kind: gvk.Kind, Namespace: obj.GetNamespace(), Name: obj.GetName()}
}

// RefIn returns the Ref of an object whose type may be in scheme: typed objects usually have no kind.
func RefIn(scheme *runtime.Scheme, obj client.Object) Ref {
	gvk, err := apiutil.GVKForObject(obj, scheme)
	if err != nil {
		gvk = obj.GetObjectKind().GroupVersionKind()
	}
	return Ref{Group: gvk.Group, Version: gvk.Version, Kind: gvk.Kind, Namespace: obj.GetNamespace(), Name: obj.GetName()}
}

// GVK returns the group, version and kind of r.
func (r Ref) GVK() schema.GroupVersionKind {
	return schema.GroupVersionKind{Group: r.Group, Version: r.Version, Kind: r.Kind}
}

// Key returns r without its version: the identity of an object, which is the same in every version of its API.
func (r Ref) Key() Ref {
	r.Version = ""
	return r
}

// String returns r for messages, for example "Deployment apps eu/web" and "Namespace eu".
func (r Ref) String() string {
	var b strings.Builder
	b.WriteString(r.Kind)
	b.WriteByte(' ')
	if r.Group != "" {
		b.WriteString(r.Group)
		b.WriteByte(' ')
	}
	if r.Namespace != "" {
		b.WriteString(r.Namespace)
		b.WriteByte('/')
	}
	b.WriteString(r.Name)
	return b.String()
}

// CompareRefs orders refs by group, kind, namespace, name and version.
func CompareRefs(a, b Ref) int {
	return cmp.Or(
		cmp.Compare(a.Group, b.Group),
		cmp.Compare(a.Kind, b.Kind),
		cmp.Compare(a.Namespace, b.Namespace),
		cmp.Compare(a.Name, b.Name),
		cmp.Compare(a.Version, b.Version),
	)
}
