package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// RemoveDeregistration removes three annotations and the option DeregisterAbandon, which the hub writes during a
// deregistration. It returns true if there were any. A cluster that is not being deleted has them only from a backup.
// They must be removed, since a later deregistration would skip its first steps. The options of the user stay.
func RemoveDeregistration(cluster metav1.Object) bool {
	annotations := maps.Clone(cluster.GetAnnotations())
	for _, key := range []string{kube.AnnotationAgentRequest, kube.AnnotationDeadline, kube.AnnotationLeftBehind} {
		delete(annotations, key)
	}
	options := strings.Split(annotations[kube.AnnotationDeregister], ",")
	if slices.Contains(options, kube.DeregisterAbandon) {
		options = slices.DeleteFunc(options, func(option string) bool { return option == kube.DeregisterAbandon })
		annotations[kube.AnnotationDeregister] = strings.Join(options, ",")
		if len(options) == 0 {
			delete(annotations, kube.AnnotationDeregister)
		}
	}
	if maps.Equal(annotations, cluster.GetAnnotations()) {
		return false
	}
	cluster.SetAnnotations(annotations)
	return true
}

// AddDeregisterOptions adds options to the annotation kube.AnnotationDeregister of the cluster object, which the hub
// reads. Then it sets the annotations and the resourceVersion of cluster. It returns NotFound if the object was
// deleted, or was created again since cluster was read. hub must read from the API server.
func AddDeregisterOptions(ctx context.Context, hub client.Client, cluster client.Object, options ...string) error {
	gvk, err := hub.GroupVersionKindFor(cluster)
	if err != nil {
		return err
	}
	live := &metav1.PartialObjectMetadata{}
	// The hub and the command line can add options at the same time: with the lock, they do not overwrite each other's.
	err = kube.RetryOnConflict(ctx, func() error {
		live = &metav1.PartialObjectMetadata{}
		live.SetGroupVersionKind(gvk)
		if err := hub.Get(ctx, client.ObjectKeyFromObject(cluster), live); err != nil {
			return err
		}
		if live.UID != cluster.GetUID() {
			return apierrors.NewNotFound(schema.GroupResource{Group: gvk.Group, Resource: gvk.Kind}, cluster.GetName())
		}
		existing := strings.FieldsFunc(live.Annotations[kube.AnnotationDeregister], func(r rune) bool { return r == ',' })
		all := union(existing, options)
		if slices.Equal(all, existing) {
			return nil
		}
		patch := client.MergeFromWithOptions(live.DeepCopy(), client.MergeFromWithOptimisticLock{})
		metav1.SetMetaDataAnnotation(&live.ObjectMeta, kube.AnnotationDeregister, strings.Join(all, ","))
		return hub.Patch(ctx, live, patch, client.FieldOwner(kube.FieldManager))
	})
	if err != nil {
		return fmt.Errorf("annotate %s with the options of its deregistration: %w", kube.RefIn(hub.Scheme(), cluster), err)
	}
	cluster.SetAnnotations(live.Annotations)
	cluster.SetResourceVersion(live.ResourceVersion)
	return nil
}

const (
	// LeftBehindAgent is the entry of ListLeftBehind for an agent that stays on its member.
	LeftBehindAgent = "the agent, in namespace " + kube.AgentNamespace
	// maxLeftBehindBytes limits the list of ListLeftBehind, in bytes. The annotations of an object may have 256 KiB.
	maxLeftBehindBytes = 64 << 10
	// leftBehindTruncated is the entry that replaces the end of a list that is too long. Later calls of RecordLeftBehind
	// add entries after it.
	leftBehindTruncated = "more than can be listed here"
)

// ListLeftBehind returns descriptions of the objects that the hub has left on the member of a cluster that is
// deregistered by force. cluster is the cluster object.
func ListLeftBehind(cluster client.Object) []string {
	var left []string
	// Other parties can write this annotation.
	if err := json.Unmarshal([]byte(cluster.GetAnnotations()[kube.AnnotationLeftBehind]), &left); err != nil {
		return nil
	}
	return left
}

// RecordLeftBehind adds entries to the list of ListLeftBehind, and returns the updated object. It must be called before
// the cluster object is deleted. It fails with a conflict if cluster has been changed since it was read. A list that is
// too long is truncated.
func RecordLeftBehind[T client.Object](ctx context.Context, hub client.Client, cluster T, left ...string) (T, error) {
	all := union(ListLeftBehind(cluster), left)
	text, err := json.Marshal(all)
	for err == nil && len(text) > maxLeftBehindBytes {
		all = append(all[:(len(all)-1)/2], leftBehindTruncated)
		text, err = json.Marshal(all)
	}
	if err != nil {
		return cluster, fmt.Errorf("encode what is left behind: %w", err)
	}
	if len(all) == 0 || string(text) == cluster.GetAnnotations()[kube.AnnotationLeftBehind] {
		return cluster, nil
	}
	updated := cluster.DeepCopyObject().(T)
	annotations := maps.Clone(cluster.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[kube.AnnotationLeftBehind] = string(text)
	updated.SetAnnotations(annotations)
	// With the lock, concurrent calls do not overwrite each other's lists.
	patch := client.MergeFromWithOptions(cluster, client.MergeFromWithOptimisticLock{})
	if err := hub.Patch(ctx, updated, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return cluster, fmt.Errorf("note what is left behind on cluster %s: %w", client.ObjectKeyFromObject(cluster), err)
	}
	return updated, nil
}

// union returns the elements of a and then of b, without duplicates.
func union(a, b []string) []string {
	var all []string
	for _, text := range slices.Concat(a, b) {
		if !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	return all
}
