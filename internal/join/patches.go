package join

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// ErrPatch says that the patches for an agent's manifest cannot be used. The error names the ConfigMap, the key and the
// reason.
var ErrPatch = errors.New("patches of the agent's manifest")

// patchesAnnotation on Namespace kube.AgentNamespace of the hub names the ConfigMap with the patches for agents of
// clusters that name none.
const patchesAnnotation = "towline.dev/agent-patch-config-map"

// PublishPatches makes configMap, <namespace>/<name> on the hub, the one whose patches are for the manifests of all
// pull-mode clusters that do not name another one in annotation libv1beta1.AgentConfigAnnotation; empty: there are
// none. It need not exist yet. Everyone who makes manifests goes by it, on the command line too.
func PublishPatches(ctx context.Context, hub client.Client, configMap string) error {
	if configMap != "" {
		if _, err := ParsePatchesReference(configMap); err != nil {
			return err
		}
	}
	namespace := &corev1.Namespace{}
	if err := hub.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, namespace); err != nil {
		return fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
	}
	if namespace.Annotations[patchesAnnotation] == configMap {
		return nil
	}
	before := namespace.DeepCopy()
	if metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, patchesAnnotation, configMap); configMap == "" {
		delete(namespace.Annotations, patchesAnnotation)
	}
	if err := hub.Patch(ctx, namespace, client.MergeFrom(before), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write the agents' patches onto namespace %s: %w", kube.AgentNamespace, err)
	}
	return nil
}

// ParsePatchesReference reads <namespace>/<name> of a ConfigMap.
func ParsePatchesReference(text string) (client.ObjectKey, error) {
	namespace, name, _ := strings.Cut(text, "/")
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return client.ObjectKey{}, fmt.Errorf("%q is not <namespace>/<name> of a ConfigMap", text)
	}
	return client.ObjectKey{Namespace: namespace, Name: name}, nil
}

// patchesFor reads the patches for a cluster's manifest, in the order of their keys.
func patchesFor(ctx context.Context, hub client.Reader, cluster *libv1beta1.SveltosCluster) ([]patch, error) {
	reference := cluster.Annotations[libv1beta1.AgentConfigAnnotation]
	said := "annotation " + libv1beta1.AgentConfigAnnotation
	if reference == "" {
		namespace := &corev1.Namespace{}
		if err := hub.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, namespace); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
		}
		reference, said = namespace.Annotations[patchesAnnotation], "--agent-patch-config-map of the hub"
	}
	if reference == "" {
		return nil, nil
	}
	key, err := ParsePatchesReference(reference)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrPatch, said, err)
	}
	configMap := &corev1.ConfigMap{}
	if err := hub.Get(ctx, key, configMap); apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%w: ConfigMap %s, which %s names, does not exist", ErrPatch, key, said)
	} else if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s: %w", key, err)
	}
	if len(configMap.BinaryData) > 0 {
		return nil, fmt.Errorf("%w: ConfigMap %s: patches are in data, and it has binaryData", ErrPatch, key)
	}
	var patches []patch
	for _, name := range slices.Sorted(maps.Keys(configMap.Data)) {
		parsed, err := parsePatches(fmt.Sprintf("ConfigMap %s, key %s", key, name), configMap.Data[name])
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrPatch, err)
		}
		patches = append(patches, parsed...)
	}
	return patches, nil
}

// deleteManifest takes the kept manifest away: what was to be in it cannot be told any more. The token in it lives as
// long as it would have.
func (m Manifests) deleteManifest(ctx context.Context, r *registration) error {
	secret, err := r.registrationSecret(ctx)
	if err != nil || secret == nil || len(secret.Data) == 0 {
		return err
	}
	before := secret.DeepCopy()
	delete(secret.Data, ManifestKey)
	delete(secret.Annotations, inputsAnnotation)
	delete(secret.Annotations, renewAnnotation)
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := m.Hub.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take the manifest out of Secret %s: %w", client.ObjectKeyFromObject(secret), err)
	}
	return nil
}
