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

// Content with deploymentType Local is deployed to the cluster of the hub, once for each matching cluster. A reconcile
// has a second state for this content, the local state. Its member is fleet.Member.OnHub. The same steps build, deliver
// and withdraw a separate bundle for each feature. The status of the summary has the worse state of both bundles.

// newState returns the state of a reconcile, with its local state.
func newState(summary *configv1beta1.ClusterSummary, cluster client.Object, member fleet.Member) *state {
	local := &state{summary: summary, cluster: cluster, member: member.OnHub()}
	return &state{summary: summary, cluster: cluster, member: member, local: local}
}

// isLocal returns whether this is the local state.
func (s *state) isLocal() bool { return s.member.Mode == fleet.Local }

func (s *state) deploymentType() libv1beta1.DeploymentType { return deploymentTypeOf(s.member.Mode) }

func deploymentTypeOf(mode fleet.Mode) libv1beta1.DeploymentType {
	if mode == fleet.Local {
		return libv1beta1.DeploymentTypeLocal
	}
	return libv1beta1.DeploymentTypeRemote
}

// SpecForMode returns spec with only the content for the hub in the mode Local, and for the member in the other modes.
func SpecForMode(spec configv1beta1.ProfileSpec, mode fleet.Mode) configv1beta1.ProfileSpec {
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

// allWantedFeatures returns the features that are wanted on the member, on the hub or on both.
func (s *state) allWantedFeatures() []libv1beta1.FeatureID {
	return slices.DeleteFunc(allFeatures(), func(f libv1beta1.FeatureID) bool {
		return !slices.Contains(s.wantedFeatures(), f) && !slices.Contains(s.local.wantedFeatures(), f)
	})
}

// forMode returns r with SpecForMode.
func (r ComposeRequest) forMode(mode fleet.Mode) ComposeRequest {
	summary := *r.Summary
	summary.Spec.ClusterProfileSpec = SpecForMode(summary.Spec.ClusterProfileSpec, mode)
	r.Summary, r.IsLocal = &summary, mode == fleet.Local
	return r
}

// withdrawLocal withdraws the unwanted features from the cluster of the hub. It runs before the checks of the member,
// since it does not need the member. If the hub gets new features, withdrawFeatures withdraws the unwanted ones after
// the new ones are delivered.
func (c *Controller) withdrawLocal(ctx context.Context, s *state) error {
	if err := c.findDeployed(ctx, s.local); err != nil || s.local.hasNewFeatures() {
		return err
	}
	canWithdraw, err := c.canWithdrawLocal(ctx, s)
	if err != nil {
		return err
	}
	s.local.canAbandon = !canWithdraw || s.isDeleting() && s.member.Abandoned
	if !canWithdraw {
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

// canWithdrawLocal returns whether the objects on the hub may be deleted. It is false if the cluster object of a
// deleted summary may only be missing because the hub was restored from a backup. Without the cluster object, it is
// true only if this process has seen the deletion of the cluster, if the profile is being deleted, or if the withdrawal
// has begun.
func (c *Controller) canWithdrawLocal(ctx context.Context, s *state) (bool, error) {
	if s.cluster != nil || !s.isDeleting() {
		return true, nil
	}
	_, isDeletionSeen := c.deletedClusters.Get(s.member.ID())
	hasDeployed := slices.ContainsFunc(slices.Collect(maps.Values(s.local.deployed)), func(d bundle.Deployed) bool { return !d.Removing })
	if isDeletionSeen || !hasDeployed {
		return true, nil
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

// watchDeletions adds the clusters for which the watch reports a deletion to deletedClusters. It does not add a cluster
// that is only missing in a relist, as after a restore of the hub. It uses handlers of its own that return at once:
// with a slow handler, a reconcile could abandon the objects of a cluster whose deletion is not in deletedClusters yet.
func (c *Controller) watchDeletions(ctx context.Context, clusters cache.Informers) error {
	for _, kind := range fleet.NewObjects() {
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
				if cluster, ok := obj.(client.Object); ok { // after a relist, obj is a toolscache.DeletedFinalStateUnknown
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

func (s *state) hasNewFeatures() bool { return len(s.newFeatures()) > 0 }

// newFeatures returns the wanted features that were not deployed, or were being withdrawn, when the reconcile began.
func (s *state) newFeatures() []libv1beta1.FeatureID {
	return slices.DeleteFunc(s.wantedFeatures(), func(f libv1beta1.FeatureID) bool {
		deployed, ok := s.deployed[f]
		return ok && !deployed.Removing
	})
}

// hasDeliveredNewFeatures returns whether the reconcile has delivered all newFeatures.
func (s *state) hasDeliveredNewFeatures() bool {
	return !slices.ContainsFunc(s.newFeatures(), func(f libv1beta1.FeatureID) bool { return !slices.Contains(s.delivered, f) })
}

// mergeLocal adds the results of the local state to s.
func (s *state) mergeLocal() {
	isWantedIn := func(s *state) func(libv1beta1.FeatureID) bool {
		return func(f libv1beta1.FeatureID) bool { return slices.Contains(s.wantedFeatures(), f) }
	}
	s.result.Features = status.MergeLocal(s.result.Features, s.local.result.Features, isWantedIn(s), isWantedIn(s.local))
	s.retryErr = errors.Join(s.retryErr, s.local.retryErr)
	s.isClusterSlow = s.isClusterSlow || s.local.isClusterSlow
	s.isProfileSlow = s.isProfileSlow || s.local.isProfileSlow
	if s.local.recheckAfter > 0 {
		s.requeueWithin(s.local.recheckAfter)
	}
}

// checkItems returns a phase.TerminalError if items must not be delivered.
func (r ComposeRequest) checkItems(items []bundle.Item) error {
	if err := checkObjects(items); err != nil || !r.IsLocal {
		return err
	}
	return checkLocal(items)
}

// checkLocal returns an error if items have an object that belongs to Towline itself. Without this check, content with
// a wrong name could replace the hub's own objects, or the cluster objects and their state.
func checkLocal(items []bundle.Item) error {
	for _, item := range items {
		for _, obj := range item.Objects {
			if reason := reservedReason(obj); reason != "" {
				return phase.TerminalErrorf("%s belongs to Towline: %s", kube.RefOf(obj), reason)
			}
		}
	}
	return nil
}

// reservedReason returns the reason why an object on the hub's cluster belongs to Towline, "" if it does not.
func reservedReason(obj *unstructured.Unstructured) string {
	group, kind := obj.GroupVersionKind().Group, obj.GetKind()
	switch {
	case obj.GetNamespace() == kube.AgentNamespace, kind == "Namespace" && group == "" && obj.GetName() == kube.AgentNamespace:
		return fmt.Sprintf("namespace %s is that of the hub", kube.AgentNamespace)
	case kind == "CustomResourceDefinition" && isReservedGroup(definedGroup(obj)):
		return "the hub installs it"
	case slices.Contains(writtenByHub(), kind) && isReservedGroup(group):
		return "only the hub and its agents write objects of this kind"
	case strings.HasPrefix(obj.GetName(), "towline-") && (group == "rbac.authorization.k8s.io" || group == "admissionregistration.k8s.io"):
		return "the name begins with towline-"
	}
	return ""
}

// isReservedGroup returns whether an API group belongs to Towline, Sveltos or Karmada.
func isReservedGroup(group string) bool {
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
