package summaries

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// The hub stores a digest of the inputs of a delivered bundle: in its ConfigurationGroup, or in push mode in its record
// on the member. While the current inputs have the same digest, a bundle that the member has applied is neither built
// nor delivered again. So after a restart of the hub, the reconcile of an unchanged summary fetches no chart, expands
// no template of the content and reads no content. It reads only from the cache, and in push mode the member's records
// once. The digest is only an optimization: without one, the bundle is built.
//
// Bundles for the hub's own cluster and bundles with Composition.hasUnknownInputs have no digest.

// BundleInputs are the inputs of the bundle of one feature. The digest is calculated from their JSON. The bundle is
// built again after a change of any field.
type BundleInputs struct {
	// Code is Composer.CodeVersion: after an upgrade of the hub, the same inputs can be rendered differently.
	Code string
	// Summary is the UID of the summary, and Generation stands for its spec. The UID is needed because a summary that was
	// created again, or restored from a backup, can have the same generation with another spec.
	Summary    types.UID
	Generation int64
	// Owner is the profile: another profile that takes over the summary becomes the owner of the objects, and can have
	// permission to read other content.
	Owner bundle.Owner
	// Objects are the referenced objects. The templates in their names are expanded.
	Objects []InputObject
	// Resources is source.Resources.Digest, for the objects of templateResourceRefs.
	Resources string
	// Cluster is the cluster object as JSON if a template or a script can read it, and empty otherwise. Then a change of
	// the cluster does not change the digest.
	Cluster []byte
	// Account is bundle.Options.ServiceAccount: labels of the profile set it, and do not change Generation.
	Account string `json:",omitempty"`
	// Helm is set for the feature Helm.
	Helm *HelmInputs `json:",omitempty"`
}

// InputObject is a version of a referenced object. Version is the resourceVersion of a ConfigMap or a Secret, the
// digest of the content of a URL, or the URL, the digest and the language of the artifact of a Flux source.
type InputObject struct {
	Reference source.Reference
	UID       types.UID
	Version   string
}

// currentInputs are the inputs of a bundle in this reconcile. isKnown is false if no digest can be calculated.
type currentInputs struct {
	BundleInputs

	isKnown bool
}

// digestFor returns the digest for a bundle that was built after the inputs were read, "" if it must have none. That is
// also the case if the content of a URL or a Flux source has changed in between: i has the version of the former
// content, and such a source can return to that version, unlike an object to a former resourceVersion.
func (i currentInputs) digestFor(built Composition) (string, error) {
	if !i.isKnown || built.hasUnknownInputs {
		return "", nil
	}
	for _, content := range built.contents {
		if content.Reference.Kind != source.KindURL && !content.Reference.IsFlux() {
			continue
		}
		if !slices.ContainsFunc(i.Objects, func(input InputObject) bool {
			return input.Reference == content.Reference && input.Version == content.Version
		}) {
			return "", nil
		}
	}
	if i.Helm != nil {
		i.Helm = i.Helm.afterBuild(built)
	}
	return i.Digest()
}

// matchesDigest returns whether digest is the digest of a bundle that was built from the inputs.
func (i currentInputs) matchesDigest(digest string) (bool, error) {
	if !i.isKnown || digest == "" {
		return false, nil
	}
	variants := []*HelmInputs{nil}
	if i.Helm != nil {
		variants = i.Helm.variants()
	}
	for _, i.Helm = range variants {
		current, err := i.Digest()
		if err != nil || current == digest {
			return err == nil, err
		}
	}
	return false, nil
}

// inputsOf returns the inputs of a feature's bundle. isKnown is false for example if a referenced object does not
// exist. It must be called before the bundle is built: if the cache is behind, the bundle then has the digest of older
// inputs, and the watch event of the change causes another reconcile.
func (c *Controller) inputsOf(ctx context.Context, s *state, r ComposeRequest, feature libv1beta1.FeatureID) (currentInputs, error) {
	if s.isLocal() || c.Composer.CodeVersion == "" || r.hasUnknownConflicts {
		return currentInputs{}, nil
	}
	references, err := referencesOf(r, feature)
	if err != nil {
		return currentInputs{}, nil //nolint:nilerr // Compose returns the error
	}
	account, err := r.account()
	if err != nil {
		return currentInputs{}, nil //nolint:nilerr // Compose returns the error
	}
	inputs := BundleInputs{Account: account, Code: c.Composer.CodeVersion, Summary: s.summary.UID, Generation: s.summary.Generation, Owner: r.Owner, Resources: r.TemplateContext.Resources.Digest}
	readsCluster := hasPatchTemplate(s.spec()) || hasReferenceTemplate(s.spec(), feature)
	for _, reference := range references {
		input, contentReadsCluster, err := c.inputOf(ctx, reference)
		if err != nil {
			return currentInputs{}, err
		}
		if input.Version == "" {
			return currentInputs{}, nil
		}
		inputs.Objects, readsCluster = append(inputs.Objects, input), readsCluster || contentReadsCluster
	}
	if readsCluster {
		if inputs.Cluster, err = json.Marshal(fleet.WithoutVolatileFields(s.cluster)); err != nil {
			return currentInputs{}, fmt.Errorf("encode cluster %s: %w", s.member.Key(), err)
		}
	}
	if feature == libv1beta1.FeatureHelm {
		if inputs.Helm, err = c.helmInputsOf(ctx, s, r); err != nil {
			return currentInputs{}, err
		}
	}
	return currentInputs{BundleInputs: inputs, isKnown: true}, nil
}

// referencesOf returns the references of a feature that can be resolved, and the first error.
func referencesOf(r ComposeRequest, feature libv1beta1.FeatureID) ([]source.Reference, error) {
	return map[libv1beta1.FeatureID]func(ComposeRequest) ([]source.Reference, error){
		libv1beta1.FeatureResources: manifestReferences,
		libv1beta1.FeatureHelm:      chartReferences,
		libv1beta1.FeatureKustomize: kustomizationReferences,
	}[feature](r)
}

// Digest returns the digest that is stored in the ConfigurationGroup or the record.
func (i BundleInputs) Digest() (string, error) {
	raw, err := json.Marshal(i)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(raw)
	return base64.RawStdEncoding.EncodeToString(sum[:]), nil
}

// hasReferenceTemplate returns whether the references of a feature can have templates whose results are not part of
// InputObject, for example in a path.
func hasReferenceTemplate(spec configv1beta1.ProfileSpec, feature libv1beta1.FeatureID) bool {
	switch feature {
	case libv1beta1.FeatureKustomize:
		return hasTemplates(spec.KustomizationRefs)
	case libv1beta1.FeatureHelm:
		return hasTemplates(spec.HelmCharts)
	}
	return slices.ContainsFunc(spec.PolicyRefs, func(ref libv1beta1.PolicyRef) bool {
		return ref.RemoteURL != nil && ref.RemoteURL.Template || strings.Contains(ref.Path, "{{")
	})
}

// inputOf returns an object with its current version. Version is "" if the object does not exist, or if its version is
// not known yet. readsCluster is true if templates or scripts in its content can read the cluster.
func (c *Controller) inputOf(ctx context.Context, reference source.Reference) (input InputObject, readsCluster bool, err error) {
	if reference.Kind == source.KindURL {
		return c.Composer.urlInput(ctx, reference), false, nil
	}
	if reference.IsFlux() {
		input, readsCluster = c.fluxInput(ctx, reference)
		return input, readsCluster, nil
	}
	object, err := c.readMetadata(ctx, reference)
	if err != nil {
		return InputObject{}, false, err
	}
	_, isTemplate := object.Annotations[libv1beta1.TemplateAnnotation]
	_, isLua := object.Annotations[libv1beta1.LuaAnnotation]
	return InputObject{Reference: reference, UID: object.UID, Version: object.ResourceVersion}, isTemplate || isLua, nil
}

// readMetadata returns the cached metadata of a ConfigMap or a Secret, empty metadata if it does not exist.
func (c *Controller) readMetadata(ctx context.Context, reference source.Reference) (*metav1.PartialObjectMetadata, error) {
	object := &metav1.PartialObjectMetadata{}
	object.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind(reference.Kind))
	key := client.ObjectKey{Namespace: reference.Namespace, Name: reference.Name}
	if err := c.metadata.Get(ctx, key, object, client.UnsafeDisableDeepCopy); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read metadata of %s: %w", reference, err)
	}
	return object, nil
}

// reuseDelivered checks whether the member has applied a bundle that was built from the same inputs. If so, it adds the
// result of that bundle and returns true. In any other state, or with an outdated release, it returns false: the bundle
// must be built and delivered again.
func (c *Controller) reuseDelivered(ctx context.Context, s *state, feature libv1beta1.FeatureID, inputs currentInputs) (bool, error) {
	deployed, ok := s.deployed[feature]
	if !ok || deployed.Removing || deployed.Report.State != bundle.StateApplied || len(deployed.Report.Outdated) > 0 {
		return false, nil
	}
	// The first reconcile after the member has reported Applied must build the bundle, since recordDeployed lists its
	// objects in the ClusterConfiguration.
	old := s.featureSummary(feature)
	if old.Status != libv1beta1.FeatureStatusProvisioned || !s.result.HashKey.IsHashOf(old.Hash, deployed.Report.Digest) {
		return false, nil
	}
	if isSame, err := inputs.matchesDigest(deployed.Inputs); err != nil || !isSame {
		return false, err
	}
	result := status.FeatureResult{Feature: feature, Kind: status.Delivered, DesiredDigest: deployed.Report.Digest, Report: deployed.Report}
	if feature == libv1beta1.FeatureHelm {
		result.Releases = s.summary.Status.HelmReleaseSummaries // the digest covers them: HelmInputs.Releases
	}
	updated := status.ComputeStatus(s.summary.Status, status.ReconcileResult{Features: []status.FeatureResult{result}, HashKey: s.result.HashKey})
	owner := ProfileOf(s.summary)
	if owner == nil || !c.Configurations.hasEntryOf(ctx, s.member, *owner, status.FeatureOf(updated, feature)) {
		return false, nil
	}
	s.addResult(result)
	return true, nil
}

// hasEntryOf returns whether the cached ClusterConfiguration of m, or a pending change of it, lists the objects or the
// charts of the bundle that a feature applied last. They are missing if the hub was killed before it wrote them.
func (c *Configurations) hasEntryOf(ctx context.Context, m fleet.Member, owner metav1.OwnerReference, feature configv1beta1.FeatureSummary) bool {
	if pending, ok := c.pendingFeature(ConfigurationKey(m), owner, feature.FeatureID); ok {
		return matchesLastApplied(pending, pending.Resources, feature)
	}
	configuration := &configv1beta1.ClusterConfiguration{}
	if err := c.hub.Get(ctx, ConfigurationKey(m), configuration, client.UnsafeDisableDeepCopy); err != nil {
		return false // the bundle is built, and its objects are recorded
	}
	deployed, ok := status.FindDeployedFeature(configuration.Status, owner.Kind, owner.Name, feature.FeatureID)
	return ok && matchesLastApplied(deployed, status.ResourcesOf(deployed, libv1beta1.DeploymentTypeRemote), feature)
}

// matchesLastApplied returns whether an entry of the ClusterConfiguration is of the bundle that a feature applied last.
// resources are the objects on the member in that entry. Several bundles can have the same LastAppliedTime, which has
// whole seconds, so the hash is compared, too. An entry has no hash if an earlier CustomResourceDefinition pruned it.
func matchesLastApplied(entry configv1beta1.DeployedFeature, resources []configv1beta1.DeployedResource, feature configv1beta1.FeatureSummary) bool {
	if len(entry.Hash) > 0 && !bytes.Equal(entry.Hash, feature.Hash) {
		return false
	}
	if len(entry.Charts) > 0 {
		return entry.Charts[0].LastAppliedTime.Equal(feature.LastAppliedTime)
	}
	return len(resources) > 0 && resources[0].LastAppliedTime.Equal(feature.LastAppliedTime)
}

// CodeVersion returns the digest of the executable at path. The same executable renders the same inputs equally.
func CodeVersion(path string) (string, error) {
	program, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("open the program: %w", err)
	}
	defer program.Close() //nolint:errcheck // it was only read
	sum := sha256.New()
	if _, err := io.Copy(sum, program); err != nil {
		return "", fmt.Errorf("read the program: %w", err)
	}
	return base64.RawStdEncoding.EncodeToString(sum.Sum(nil)), nil
}
