package summaries

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// UnsupportedFields returns the fields of a spec that have no effect yet.
func UnsupportedFields(spec configv1beta1.ProfileSpec) []string {
	return append(render.Unsupported(spec), match.UnsupportedRefs(spec)...)
}

// newComposeRequest returns the request to build the bundles of a summary. It sets s.memory, which the caller releases.
func (c *Controller) newComposeRequest(s *state) (ComposeRequest, error) {
	owner, err := bundleOwnerOf(s.summary)
	if err != nil {
		return ComposeRequest{}, err
	}
	tmplCtx, err := TemplateContextFor(s.summary, s.cluster, c.Composer.Sandbox)
	if err != nil {
		return ComposeRequest{}, err
	}
	s.memory = c.Composer.Sandbox.Memory().Reserve(s.member.Namespace)
	s.local.memory = s.memory
	tmplCtx.Expansions, tmplCtx.Memory = c.Composer.Expansions, s.memory
	request := ComposeRequest{Summary: s.summary, Member: s.member, TemplateContext: tmplCtx, Owner: owner, SharedBy: match.PullMembers(s.summary)}
	if deployed := s.deployed[libv1beta1.FeatureHelm]; !deployed.Removing {
		request.Deployed, request.State, request.Outdated = deployed.Releases, deployed.Report.State, deployed.Report.Outdated
	}
	return request, nil
}

// specDigest returns a digest of the spec of a profile. It is the same for all clusters.
func specDigest(summary *configv1beta1.ClusterSummary) string {
	raw, _ := json.Marshal(summary.Spec.ClusterProfileSpec) // cannot fail for this type
	return fmt.Sprintf("%x", sha256.Sum256(raw))
}

// TemplateContextFor returns the data for the templates of a summary: its cluster, and the only namespace from which a
// Profile can read. It returns a phase.TerminalError for a summary without a profile.
func TemplateContextFor(summary *configv1beta1.ClusterSummary, cluster client.Object, pool *sandbox.Pool) (source.TemplateContext, error) {
	owner, err := bundleOwnerOf(summary)
	if err != nil {
		return source.TemplateContext{}, err
	}
	tmplCtx := templateContextOfCluster(cluster, pool)
	tmplCtx.Profile = profileKey(summary)
	if owner.Kind == configv1beta1.ProfileKind {
		// Users who may write Profiles in one namespace must not read other namespaces through them.
		tmplCtx.RestrictedNamespace = summary.Namespace
	}
	return tmplCtx, nil
}

// templateContextOfCluster returns the data of a cluster for templates, without volatile fields.
func templateContextOfCluster(cluster client.Object, pool *sandbox.Pool) source.TemplateContext {
	member := fleet.FromObject(cluster)
	convert := sync.OnceValues(func() (map[string]any, error) {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(fleet.WithoutVolatileFields(cluster))
		if err != nil {
			return nil, fmt.Errorf("convert cluster %s: %w", member.Key(), err)
		}
		return fields, nil
	})
	return source.TemplateContext{Cluster: convert, Namespace: member.Namespace, Name: member.Name, Sandbox: pool}
}

// ProfileOf returns the owner reference of a summary to its profile, nil if it has none. An owner that is not the
// controller, or has another kind or group, does not count. The UID and the name in the reference are not verified: a
// user who may write summaries in one namespace can set both.
func ProfileOf(summary client.Object) *metav1.OwnerReference {
	controller := metav1.GetControllerOf(summary)
	if controller == nil || controller.Kind != configv1beta1.ProfileKind && controller.Kind != configv1beta1.ClusterProfileKind {
		return nil
	}
	if gv, err := schema.ParseGroupVersion(controller.APIVersion); err != nil || gv.Group != configv1beta1.GroupVersion.Group {
		return nil
	}
	return controller
}

// bundleOwnerOf returns the profile of a summary as the owner of bundles. It returns a phase.TerminalError for a
// summary without a profile, since its content would not be restricted to a namespace.
func bundleOwnerOf(summary *configv1beta1.ClusterSummary) (bundle.Owner, error) {
	profile := ProfileOf(summary)
	if profile == nil {
		if controller := metav1.GetControllerOf(summary); controller != nil {
			return bundle.Owner{}, phase.TerminalErrorf("ClusterSummary %s belongs to %s %s of %s, which is no profile",
				client.ObjectKeyFromObject(summary), controller.Kind, controller.Name, controller.APIVersion)
		}
		return bundle.Owner{}, phase.TerminalErrorf("ClusterSummary %s belongs to no profile", client.ObjectKeyFromObject(summary))
	}
	owner := bundle.Owner{Kind: profile.Kind, Name: profile.Name, Tier: tierOrDefault(summary.Spec.ClusterProfileSpec.Tier)}
	if owner.Kind == configv1beta1.ProfileKind {
		owner.Name = summary.Namespace + "/" + owner.Name
	}
	return owner, nil
}
