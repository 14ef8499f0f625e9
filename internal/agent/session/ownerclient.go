package session

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

// ObjectRef identifies an object of an agent on its member.
type ObjectRef struct {
	Resource  schema.GroupVersionResource
	Namespace string
	Name      string
}

// NewObjectRef returns an ObjectRef; namespace is "" for cluster-scoped resources.
func NewObjectRef(resource schema.GroupVersionResource, namespace, name string) ObjectRef {
	return ObjectRef{Resource: resource, Namespace: namespace, Name: name}
}

// String returns the object as resource/namespace/name.
func (o ObjectRef) String() string {
	return strings.Trim(o.Resource.Resource+"/"+o.Namespace+"/"+o.Name, "/")
}

// OwnerClient sets owner references of an agent's objects, so that the garbage collector deletes them with their owner.
// The agent cannot delete them one by one: they include its own permissions and its Deployment.
// Create it with NewOwnerClient.
type OwnerClient struct {
	Metadata metadata.Interface
	// Kind and Name identify the owner, regardless of its UID.
	Kind, Name string

	config *rest.Config
}

// NewOwnerClient returns an OwnerClient for owners of that kind and name on a member.
func NewOwnerClient(member *rest.Config, kind, name string) (*OwnerClient, error) {
	config := rest.CopyConfig(member)
	// ReasonToKeepNamespace lists every kind, including deprecated ones.
	config.WarningHandler = rest.NoWarnings{}
	// ReasonToKeepNamespace sends a request per kind, and the hub waits for the uninstallation.
	config.QPS = -1
	metadataClient, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create a client for the member: %w", err)
	}
	return &OwnerClient{Metadata: metadataClient, Kind: kind, Name: name, config: config}, nil
}

// SetOwner replaces the owners of o that have the OwnerClient's kind and name by owner. If owner is nil, it only
// removes them. Other owners stay. A missing object is not an error.
func (c *OwnerClient) SetOwner(ctx context.Context, o ObjectRef, owner *metav1.OwnerReference) error {
	err := kube.RetryOnConflict(ctx, func() error {
		live, err := c.resource(o).Get(ctx, o.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		desired := c.WithOwner(live.OwnerReferences, owner)
		if slices.EqualFunc(live.OwnerReferences, desired, func(a, b metav1.OwnerReference) bool { return a.UID == b.UID }) {
			return nil
		}
		return c.Patch(ctx, o, map[string]any{"resourceVersion": live.ResourceVersion, "ownerReferences": desired})
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("set the owner of %s: %w", o, err)
	}
	return nil
}

// Get returns the metadata of o.
func (c *OwnerClient) Get(ctx context.Context, o ObjectRef) (*metav1.PartialObjectMetadata, error) {
	return c.resource(o).Get(ctx, o.Name, metav1.GetOptions{})
}

// Delete deletes o, and its dependents in the background. A missing object is not an error, another UID is a Conflict.
func (c *OwnerClient) Delete(ctx context.Context, o ObjectRef, uid types.UID) error {
	err := c.resource(o).Delete(ctx, o.Name, metav1.DeleteOptions{
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground), Preconditions: metav1.NewUIDPreconditions(string(uid)),
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s: %w", o, err)
	}
	return nil
}

// Patch merges fields into the metadata of o.
func (c *OwnerClient) Patch(ctx context.Context, o ObjectRef, fields map[string]any) error {
	body, err := json.Marshal(map[string]any{"metadata": fields})
	if err != nil {
		return fmt.Errorf("encode patch of %s: %w", o, err)
	}
	_, err = c.resource(o).Patch(ctx, o.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
	return err
}

func (c *OwnerClient) resource(o ObjectRef) metadata.ResourceInterface {
	if o.Namespace == "" {
		return c.Metadata.Resource(o.Resource)
	}
	return c.Metadata.Resource(o.Resource).Namespace(o.Namespace)
}

// WithOwner returns a copy of references without owners of the OwnerClient's kind and name, and with owner unless it is
// nil.
func (c *OwnerClient) WithOwner(references []metav1.OwnerReference, owner *metav1.OwnerReference) []metav1.OwnerReference {
	desired := slices.DeleteFunc(slices.Clone(references), func(r metav1.OwnerReference) bool {
		return r.Kind == c.Kind && r.Name == c.Name
	})
	if owner != nil {
		desired = append(desired, *owner)
	}
	return desired
}

// ReasonToKeepNamespace returns the reason why a namespace must be kept, usually a foreign object, or "" if it may be
// deleted: see foreign.ReasonToKeep. The objects in own, their dependents, and the objects that Kubernetes creates in
// every namespace are no reason.
func (c *OwnerClient) ReasonToKeepNamespace(ctx context.Context, namespace string, own []ObjectRef) (string, error) {
	memberClient, err := client.New(c.config, client.Options{})
	if err != nil {
		return "", fmt.Errorf("create a client for the member: %w", err)
	}
	discoveryClient, err := discovery.NewDiscoveryClientForConfig(c.config)
	if err != nil {
		return "", fmt.Errorf("create a client for the member: %w", err)
	}
	return foreign.ReasonToKeep(ctx, memberClient, discoveryClient, namespace, func(item *metav1.PartialObjectMetadata) bool {
		resource, _ := meta.UnsafeGuessKindToResource(item.GroupVersionKind())
		return slices.ContainsFunc(own, func(o ObjectRef) bool {
			return o.Namespace == namespace && o.Name == item.Name && o.Resource.GroupResource() == resource.GroupResource()
		})
	})
}
