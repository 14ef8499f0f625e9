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

// ErrPatch is returned if the patches for an agent's manifest are invalid, or if their ConfigMap does not exist. The
// error names the ConfigMap, the key of an invalid patch, and the reason.
var ErrPatch = errors.New("patches of the agent's manifest")

// patchesAnnotation on Namespace kube.AgentNamespace of the hub is the <namespace>/<name> of the default ConfigMap with
// patches, for clusters without annotation libv1beta1.AgentConfigAnnotation.
const patchesAnnotation = "towline.dev/agent-patch-config-map"

// defaultPatchesSource names in errors where the reference to the default ConfigMap is from.
const defaultPatchesSource = "--agent-patch-config-map of the hub"

// PublishPatches records the default patch ConfigMap, as <namespace>/<name>, on Namespace kube.AgentNamespace, "" for
// none. The hub and sveltosctl read it when they create the manifest of a pull-mode cluster that has no annotation
// libv1beta1.AgentConfigAnnotation. The ConfigMap may be created later.
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

// ParsePatchesReference parses the <namespace>/<name> of a ConfigMap. It returns an error for an invalid name.
func ParsePatchesReference(text string) (client.ObjectKey, error) {
	namespace, name, _ := strings.Cut(text, "/")
	if len(validation.IsDNS1123Label(namespace)) > 0 || len(validation.IsDNS1123Subdomain(name)) > 0 {
		return client.ObjectKey{}, fmt.Errorf("%q is not <namespace>/<name> of a ConfigMap", text)
	}
	return client.ObjectKey{Namespace: namespace, Name: name}, nil
}

// patchesFor returns the patches for a cluster's manifest in the order of their keys, nil without a patch ConfigMap. It
// reads the metadata of a namespace from cache.
func patchesFor(ctx context.Context, hub, cache client.Reader, cluster *libv1beta1.SveltosCluster) ([]patch, error) {
	reference := cluster.Annotations[libv1beta1.AgentConfigAnnotation]
	referenceSource := "annotation " + libv1beta1.AgentConfigAnnotation
	if reference == "" {
		namespace := metadataOf("Namespace")
		if err := cache.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, namespace); client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
		}
		reference, referenceSource = namespace.Annotations[patchesAnnotation], defaultPatchesSource
	}
	if reference == "" {
		return nil, nil
	}
	key, err := ParsePatchesReference(reference)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrPatch, referenceSource, err)
	}
	configMap := &corev1.ConfigMap{}
	err = hub.Get(ctx, key, configMap)
	if isForeign := referenceSource != defaultPatchesSource && key.Namespace != cluster.Namespace && key.Namespace != kube.AgentNamespace; isForeign {
		// A user who may annotate clusters in one namespace must not read the ConfigMaps of others, or learn which exist.
		if client.IgnoreNotFound(err) == nil && configMap.Labels[kube.LabelAgentPatches] != "true" {
			return nil, fmt.Errorf("%w: ConfigMap %s, which %s names, does not exist or does not have the label %s: \"true\", which clusters in other namespaces need",
				ErrPatch, key, referenceSource, kube.LabelAgentPatches)
		}
	}
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%w: ConfigMap %s, which %s names, does not exist", ErrPatch, key, referenceSource)
	} else if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s: %w", key, err)
	}
	var patches []patch
	for _, name := range slices.Sorted(maps.Keys(configMap.Data)) {
		origin := fmt.Sprintf("ConfigMap %s, key %s", key, name)
		parsed, err := parsePatch(origin, configMap.Data[name])
		if err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrPatch, origin, err)
		}
		patches = append(patches, parsed)
	}
	return patches, nil
}
