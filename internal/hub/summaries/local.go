package summaries

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/status"
)

// Content with deploymentType Local goes to the cluster of the hub, once for each matching cluster. A reconcile has a
// second state for it, whose member is fleet.Member.OnHub: the same steps build, deliver and withdraw a bundle of its
// own for each feature. Both states share the status of the summary, which has the worse state of both bundles.

// newState returns the state of a reconcile.
func newState(summary *configv1beta1.ClusterSummary, cluster client.Object, member fleet.Member) *state {
	local := &state{summary: summary, cluster: cluster, member: member.OnHub()}
	return &state{summary: summary, cluster: cluster, member: member, local: local}
}

// isLocal returns whether this is the state of what is deployed to the cluster of the hub.
func (s *state) isLocal() bool { return s.member.Mode == fleet.Local }

// deploymentType returns the type of the content of this state.
func (s *state) deploymentType() libv1beta1.DeploymentType { return deploymentTypeOf(s.member.Mode) }

func deploymentTypeOf(mode fleet.Mode) libv1beta1.DeploymentType {
	if mode == fleet.Local {
		return libv1beta1.DeploymentTypeLocal
	}
	return libv1beta1.DeploymentTypeRemote
}

// ContentFor returns spec with the content for the hub in the mode Local, and for the member in the other modes.
func ContentFor(spec configv1beta1.ProfileSpec, mode fleet.Mode) configv1beta1.ProfileSpec {
	if mode != fleet.Local && !hasLocal(spec) {
		return spec
	}
	isOther := func(t libv1beta1.DeploymentType) bool {
		return (t == libv1beta1.DeploymentTypeLocal) != (mode == fleet.Local)
	}
	spec.PolicyRefs = slices.DeleteFunc(slices.Clone(spec.PolicyRefs), func(r libv1beta1.PolicyRef) bool { return isOther(r.DeploymentType) })
	spec.KustomizationRefs = slices.DeleteFunc(slices.Clone(spec.KustomizationRefs), func(r configv1beta1.KustomizationRef) bool {
		return isOther(r.DeploymentType)
	})
	if mode == fleet.Local {
		spec.HelmCharts = nil
	}
	return spec
}

// hasLocal returns whether a spec has content for the cluster of the hub.
func hasLocal(spec configv1beta1.ProfileSpec) bool {
	return slices.ContainsFunc(spec.PolicyRefs, func(r libv1beta1.PolicyRef) bool { return r.DeploymentType == libv1beta1.DeploymentTypeLocal }) ||
		slices.ContainsFunc(spec.KustomizationRefs, func(r configv1beta1.KustomizationRef) bool {
			return r.DeploymentType == libv1beta1.DeploymentTypeLocal
		})
}

// allWantedFeatures returns the features of the whole spec.
func (s *state) allWantedFeatures() []libv1beta1.FeatureID {
	return slices.DeleteFunc(allFeatures(), func(f libv1beta1.FeatureID) bool {
		return !slices.Contains(s.wantedFeatures(), f) && !slices.Contains(s.local.wantedFeatures(), f)
	})
}

// forMode returns the request for the content of the hub in the mode Local, and of the member in the other modes.
func (r ComposeRequest) forMode(mode fleet.Mode) ComposeRequest {
	summary := *r.Summary
	summary.Spec.ClusterProfileSpec = ContentFor(summary.Spec.ClusterProfileSpec, mode)
	r.Summary, r.IsLocal = &summary, mode == fleet.Local
	return r
}

// withdrawLocal withdraws the features that the cluster of the hub must no longer have. It does not need the member,
// unless other content for the hub must be deployed first: withdrawFeatures withdraws them after that.
func (c *Controller) withdrawLocal(ctx context.Context, s *state) error {
	if err := c.findDeployed(ctx, s.local); err != nil || s.local.lacksFeature() {
		return err
	}
	isProved, err := c.isWithdrawalProved(ctx, s)
	if err != nil {
		return err
	}
	s.local.isAbandoned = !isProved || s.isDeleting() && s.member.Abandoned
	if !isProved {
		return nil
	}
	if err := c.withdrawFrom(ctx, s.local); err != nil {
		return err
	}
	if owner := ProfileOf(s.summary); owner != nil {
		c.recordOn(s.local, *owner) // also if the member is unreachable
	}
	return nil
}

// isWithdrawalProved returns whether the objects on the hub may be deleted. If the cluster object of a deleted summary
// does not exist, the hub may be restored from a backup without it. Then there must be evidence that a user has deleted
// the cluster or the profile.
func (c *Controller) isWithdrawalProved(ctx context.Context, s *state) (bool, error) {
	if s.cluster != nil || !s.isDeleting() {
		return true, nil
	}
	_, seen := c.deletedClusters.Get(s.member.ID())
	isKept := slices.ContainsFunc(slices.Collect(maps.Values(s.local.deployed)), func(d bundle.Deployed) bool { return !d.Removing })
	if seen || !isKept {
		return true, nil // also if the withdrawal has begun
	}
	owner := ProfileOf(s.summary)
	if owner == nil {
		return false, nil
	}
	profile, key := client.Object(&configv1beta1.ClusterProfile{}), client.ObjectKey{Name: owner.Name}
	if owner.Kind == configv1beta1.ProfileKind {
		profile, key.Namespace = &configv1beta1.Profile{}, s.summary.Namespace
	}
	err := c.Live.Get(ctx, key, profile)
	return err == nil && !profile.GetDeletionTimestamp().IsZero(), client.IgnoreNotFound(err)
}

// watchDeletions adds the clusters whose deletion this process sees to deletedClusters. It does not add a cluster that
// a relist no longer returned. Its handler does nothing else: if it were behind, for example by the lists of summaries
// for earlier events, a reconcile would abandon the objects of a cluster whose deletion it does not know yet.
func (c *Controller) watchDeletions(ctx context.Context, clusters cache.Informers) error {
	for _, kind := range fleet.Kinds() {
		informer, err := clusters.GetInformer(ctx, kind, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch the deletion of clusters: %w", err)
		}
		_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
			AddFunc: func(obj any) {
				if cluster, ok := obj.(client.Object); ok {
					c.deletedClusters.Remove(fleet.FromObject(cluster).ID())
				}
			},
			DeleteFunc: func(obj any) {
				if cluster, ok := obj.(client.Object); ok { // it is toolscache.DeletedFinalStateUnknown after a relist
					c.deletedClusters.Add(fleet.FromObject(cluster).ID(), true)
				}
			},
		})
		if err != nil {
			return fmt.Errorf("watch the deletion of clusters: %w", err)
		}
	}
	return nil
}

// lacksFeature returns whether a wanted feature was not deployed when the reconcile began.
func (s *state) lacksFeature() bool { return len(s.lackingFeatures()) > 0 }

// lackingFeatures returns the wanted features that were not deployed when the reconcile began.
func (s *state) lackingFeatures() []libv1beta1.FeatureID {
	return slices.DeleteFunc(s.wantedFeatures(), func(f libv1beta1.FeatureID) bool {
		deployed, ok := s.deployed[f]
		return ok && !deployed.Removing
	})
}

// hasDeliveredLacking returns whether the reconcile has delivered all lackingFeatures.
func (s *state) hasDeliveredLacking() bool {
	return !slices.ContainsFunc(s.lackingFeatures(), func(f libv1beta1.FeatureID) bool { return !slices.Contains(s.delivered, f) })
}

// mergeLocal adds the result of the state for the hub to s.
func (s *state) mergeLocal() {
	isWanted := func(s *state) func(libv1beta1.FeatureID) bool {
		return func(f libv1beta1.FeatureID) bool { return slices.Contains(s.wantedFeatures(), f) }
	}
	s.result.Features = status.MergeLocal(s.result.Features, s.local.result.Features, isWanted(s), isWanted(s.local))
	s.retryErr = errors.Join(s.retryErr, s.local.retryErr)
	s.isClusterSlow = s.isClusterSlow || s.local.isClusterSlow
	s.isProfileSlow = s.isProfileSlow || s.local.isProfileSlow
	if s.local.recheckAfter > 0 {
		s.requeueBefore(s.local.recheckAfter)
	}
}

// check returns an error if items must not be delivered.
func (r ComposeRequest) check(items []bundle.Item) error {
	if err := checkObjects(items); err != nil || !r.IsLocal {
		return err
	}
	return checkLocal(items)
}

// checkLocal returns an error if items have an object that belongs to Towline itself. Otherwise, a template with a
// wrong name could replace the hub that applies it, or the state of a cluster that the hub keeps there.
func checkLocal(items []bundle.Item) error {
	for _, item := range items {
		for _, obj := range item.Objects {
			if reason := ownReason(obj); reason != "" {
				return phase.Invalidf("%s belongs to Towline: %s", kube.RefOf(obj), reason)
			}
		}
	}
	return nil
}

// ownReason returns the reason why an object of the hub's cluster belongs to Towline, "" for other objects.
func ownReason(obj *unstructured.Unstructured) string {
	group, kind := obj.GroupVersionKind().Group, obj.GetKind()
	switch {
	case obj.GetNamespace() == kube.AgentNamespace, kind == "Namespace" && group == "" && obj.GetName() == kube.AgentNamespace:
		return fmt.Sprintf("namespace %s is that of the hub", kube.AgentNamespace)
	case kind == "CustomResourceDefinition" && isOwnGroup(definedGroup(obj)):
		return "the hub installs it"
	case slices.Contains(writtenByHub(), kind) && isOwnGroup(group):
		return "only the hub and its agents write objects of this kind"
	case strings.HasPrefix(obj.GetName(), "towline-") && (group == "rbac.authorization.k8s.io" || group == "admissionregistration.k8s.io"):
		return "the name begins with towline-"
	}
	return ""
}

// isOwnGroup returns whether an API group is one of Towline, Sveltos or Karmada.
func isOwnGroup(group string) bool {
	return slices.ContainsFunc([]string{"projectsveltos.io", "karmada.io"}, func(domain string) bool {
		return group == domain || strings.HasSuffix(group, "."+domain)
	})
}

// definedGroup returns the group of a CustomResourceDefinition by its name, which is <plural>.<group>.
func definedGroup(obj *unstructured.Unstructured) string {
	_, group, _ := strings.Cut(obj.GetName(), ".")
	return group
}

// writtenByHub returns the kinds of Towline that no user writes.
func writtenByHub() []string {
	return []string{configv1beta1.ClusterSummaryKind, "ClusterConfiguration", "ConfigurationGroup", "ConfigurationBundle"}
}
