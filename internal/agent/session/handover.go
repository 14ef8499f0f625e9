package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/kube"
)

// Object names one of an agent's objects on its member.
type Object struct {
	Resource  schema.GroupVersionResource
	Namespace string
	Name      string
}

// NewObject names an object; one without a namespace is the cluster's.
func NewObject(resource schema.GroupVersionResource, namespace, name string) Object {
	return Object{Resource: resource, Namespace: namespace, Name: name}
}

// String prints the object as resource/namespace/name.
func (o Object) String() string {
	return strings.Trim(o.Resource.Resource+"/"+o.Namespace+"/"+o.Name, "/")
}

// Handover hands an agent's objects to the garbage collector, as dependents of one object of the agent's. Deleting that one then removes them
// all, although it takes the agent's permissions and even if the agent ends.
type Handover struct {
	Objects metadata.Interface
	// Kind and Name are those of the owner, whatever its uid.
	Kind, Name string
}

// NewHandover returns the Handover of the agent of a member to the object of that kind and name.
func NewHandover(member *rest.Config, kind, name string) (*Handover, error) {
	quiet := rest.CopyConfig(member)
	// It looks at every kind, those that are going out of use among them.
	quiet.WarningHandler = rest.NoWarnings{}
	// Each kind takes a request, and the hub waits meanwhile.
	quiet.QPS = -1
	objects, err := metadata.NewForConfig(quiet)
	if err != nil {
		return nil, fmt.Errorf("make client for the member: %w", err)
	}
	return &Handover{Objects: objects, Kind: kind, Name: name}, nil
}

// SetOwner makes o belong to owner and to no other object of the Handover's kind and name; nil means to none. An object that is not there
// needs no owner.
func (h *Handover) SetOwner(ctx context.Context, o Object, owner *metav1.OwnerReference) error {
	err := kube.OnConflict(ctx, func() error {
		live, err := h.at(o).Get(ctx, o.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		wanted := h.WithOwner(live.OwnerReferences, owner)
		if slices.EqualFunc(live.OwnerReferences, wanted, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID }) {
			return nil
		}
		return h.Patch(ctx, o, map[string]any{"resourceVersion": live.ResourceVersion, "ownerReferences": wanted})
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("set the owner of %s: %w", o, err)
	}
	return nil
}

// Get reads the metadata of o.
func (h *Handover) Get(ctx context.Context, o Object) (*metav1.PartialObjectMetadata, error) {
	return h.at(o).Get(ctx, o.Name, metav1.GetOptions{})
}

// Delete deletes o if it has that uid, and what belongs to it after it. One that is not there is no error.
func (h *Handover) Delete(ctx context.Context, o Object, uid types.UID) error {
	err := h.at(o).Delete(ctx, o.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), Preconditions: metav1.NewUIDPreconditions(string(uid)),
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", o, err)
	}
	return nil
}

// Patch changes fields of the metadata of o.
func (h *Handover) Patch(ctx context.Context, o Object, fields map[string]any) error {
	body, err := json.Marshal(map[string]any{"metadata": fields})
	if err != nil {
		return fmt.Errorf("encode patch of %s: %w", o, err)
	}
	_, err = h.at(o).Patch(ctx, o.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
	return err
}

func (h *Handover) at(o Object) metadata.ResourceInterface {
	if o.Namespace == "" {
		return h.Objects.Resource(o.Resource)
	}
	return h.Objects.Resource(o.Resource).Namespace(o.Namespace)
}

// WithOwner returns references with owner, if any, in the place of every reference to an owner of the Handover's kind and name.
func (h *Handover) WithOwner(references []metav1.OwnerReference, owner *metav1.OwnerReference) []metav1.OwnerReference {
	wanted := slices.DeleteFunc(slices.Clone(references), func(r metav1.OwnerReference) bool {
		return r.Kind == h.Kind && r.Name == h.Name
	})
	if owner != nil {
		wanted = append(wanted, *owner)
	}
	return wanted
}

// Fingerprint tells the content of a Secret apart from any other.
func Fingerprint(secret *corev1.Secret) string {
	sum := sha256.New()
	for _, key := range slices.Sorted(maps.Keys(secret.Data)) {
		_, _ = fmt.Fprintf(sum, "%s %d ", key, len(secret.Data[key])) // a hash takes everything
		sum.Write(secret.Data[key])
	}
	return hex.EncodeToString(sum.Sum(nil))
}
