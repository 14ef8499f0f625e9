package unclaimed

import (
	"context"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// state is the data that the steps of one reconcile share.
type state struct {
	cluster client.Object
	member  fleet.Member
	// deployed are the bundles of ClusterSummaries on the cluster, and the bundles for it on the hub.
	deployed []locatedBundle
	// summaries has the cached summaries of the cluster by name.
	summaries map[string]*configv1beta1.ClusterSummary
	// kept are the bundles for which decide returned keep.
	kept []locatedBundle
	// isWithdrawing is true if a withdrawal is not complete. withdrawnCount is the number of complete withdrawals.
	isWithdrawing  bool
	withdrawnCount int
}

// locatedBundle is a bundle and its location: the member, or fleet.Member.OnHub.
type locatedBundle struct {
	bundle.Deployed
	location fleet.Member
}

func (l locatedBundle) isOnHub() bool { return l.location.Mode == fleet.Local }

// listBundles reads the bundles on the cluster, and the bundles for it on the hub.
func (c *Controller) listBundles(ctx context.Context, s *state) error {
	for _, on := range []fleet.Member{s.member, s.member.OnHub()} {
		deployed, err := c.Transport.ListDeployed(ctx, on)
		if err != nil {
			return err
		}
		for _, d := range deployed {
			if d.ID.RequestorKind == configv1beta1.ClusterSummaryKind {
				s.deployed = append(s.deployed, locatedBundle{Deployed: d, location: on})
			}
		}
	}
	return nil
}

// withdrawBundles calls decide for each bundle, and withdraws the bundles for which it returns withdraw.
func (c *Controller) withdrawBundles(ctx context.Context, s *state) error {
	var err error
	if s.summaries, err = c.listSummaries(ctx, s.member); err != nil {
		return err
	}
	requested := summariesToWithdraw(s.cluster)
	for _, d := range slices.Clone(s.deployed) {
		e := evidence{deployed: d, hubUID: c.HubUID, summary: s.summaries[d.ID.RequestorName], withdrawRequested: slices.Contains(requested, d.ID.RequestorName)}
		if e.summary != nil && !e.isDropped() {
			continue // summaries.Controller manages it
		}
		orphan, err := c.gatherEvidence(ctx, s, &e)
		if err != nil {
			return err
		}
		switch decide(e) {
		case withdraw:
			// The bundle is withdrawn before the next one is checked, since the evidence can become stale. A withdrawal that has
			// started keeps its option Orphan.
			err = c.withdraw(ctx, s, d.location, bundle.Withdrawal{ID: d.ID, Orphan: orphan || (d.Removing && d.Orphan)})
		case keep:
			s.kept = append(s.kept, d)
		case claimed:
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// listSummaries returns the cached summaries of a member by name.
func (c *Controller) listSummaries(ctx context.Context, m fleet.Member) (map[string]*configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	if err := c.Hub.List(ctx, &list, client.MatchingFields{summaries.ClusterIndex: m.ID().String()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list summaries of cluster %s: %w", m.Key(), err)
	}
	known := make(map[string]*configv1beta1.ClusterSummary, len(list.Items))
	for i := range list.Items {
		known[list.Items[i].Name] = &list.Items[i]
	}
	return known, nil
}

// gatherEvidence reads the facts about the bundle from the API server into e. It replaces the cached summary in e.
// orphan is true if a withdrawal must keep the objects, since the profile has LeavePolicies.
func (c *Controller) gatherEvidence(ctx context.Context, s *state, e *evidence) (orphan bool, err error) {
	summary := &configv1beta1.ClusterSummary{}
	err = c.Live.Get(ctx, client.ObjectKey{Namespace: s.member.Namespace, Name: e.deployed.ID.RequestorName}, summary)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read summary %s: %w", e.deployed.ID.RequestorName, err)
	}
	e.summary = nil
	if err == nil {
		e.summary = summary
	}
	owner := e.deployed.Owner
	profile, spec, err := c.getProfile(ctx, owner)
	if err != nil {
		return false, err
	}
	e.profile = profileStateOf(profile, spec, s.member)
	namespace, name := splitName(owner)
	e.seenDeleted = e.profile == profileMissing && c.wasDeletionSeen(deletion{owner.Kind, namespace, name}) &&
		c.wasDeletionSeen(deletion{configv1beta1.ClusterSummaryKind, s.member.Namespace, e.deployed.ID.RequestorName})
	e.isListed, err = isListed(ctx, c.Live, e.deployed.location, e.deployed.Deployed)
	return spec != nil && spec.StopMatchingBehavior == configv1beta1.LeavePolicies, err
}

func (c *Controller) wasDeletionSeen(d deletion) bool {
	_, ok := c.seenDeleted.Get(d)
	return ok
}

// splitName returns the namespace and the name of a profile. The namespace of a ClusterProfile is "".
func splitName(owner bundle.Owner) (namespace, name string) {
	if namespacePart, namePart, ok := strings.Cut(owner.Name, "/"); ok && owner.Kind == configv1beta1.ProfileKind {
		return namespacePart, namePart
	}
	return "", owner.Name
}

// getProfile reads the profile of a bundle from the API server. It returns nil if the profile does not exist, or is not
// known.
func (c *Controller) getProfile(ctx context.Context, owner bundle.Owner) (client.Object, *configv1beta1.ProfileSpec, error) {
	namespace, name := splitName(owner)
	var profile client.Object
	var spec *configv1beta1.ProfileSpec
	switch owner.Kind {
	case configv1beta1.ClusterProfileKind:
		read := &configv1beta1.ClusterProfile{}
		profile, spec = read, &read.Spec
	case configv1beta1.ProfileKind:
		read := &configv1beta1.Profile{}
		profile, spec = read, &read.Spec
	default:
		return nil, nil, nil
	}
	err := c.Live.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, profile)
	if apierrors.IsNotFound(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read %s %s: %w", owner.Kind, owner.Name, err)
	}
	return profile, spec, nil
}

// profileStateOf returns the profileState of a profile for a member.
func profileStateOf(profile client.Object, spec *configv1beta1.ProfileSpec, m fleet.Member) profileState {
	if profile == nil {
		return profileMissing
	}
	if !profile.GetDeletionTimestamp().IsZero() {
		return profileDeleting
	}
	_, paused := profile.GetAnnotations()[libv1beta1.ProfilePausedAnnotation]
	selection, err := match.NewSelection(spec, profile.GetNamespace())
	switch {
	case paused || err != nil:
		return profileUndecided
	case len(selection.Members([]fleet.Member{m}, nil)) > 0:
		return profileMatches
	}
	return profileUnmatched
}

// isListed returns whether the cluster's ClusterConfiguration lists a bundle.
func isListed(ctx context.Context, hub client.Reader, m fleet.Member, d bundle.Deployed) (bool, error) {
	configuration := &configv1beta1.ClusterConfiguration{}
	if err := hub.Get(ctx, summaries.ConfigurationKey(m), configuration); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read ClusterConfiguration of cluster %s: %w", m.Key(), err)
	}
	_, name := splitName(d.Owner)
	features := listedFeatures(configuration.Status, m)[bundle.Owner{Kind: d.Owner.Kind, Name: name}]
	return slices.ContainsFunc(features, func(f configv1beta1.DeployedFeature) bool { return string(f.FeatureID) == d.ID.Feature }), nil
}

// withdraw requests the withdrawal of one bundle. If the withdrawal is complete, it removes the bundle from s.deployed.
func (c *Controller) withdraw(ctx context.Context, s *state, on fleet.Member, w bundle.Withdrawal) error {
	done, err := c.Transport.Withdraw(ctx, on, w)
	if err != nil {
		return err
	}
	if !done {
		s.isWithdrawing = true
		return nil
	}
	s.withdrawnCount++
	s.deployed = slices.DeleteFunc(s.deployed, func(d locatedBundle) bool { return d.ID == w.ID && d.location.Mode == on.Mode })
	log.FromContext(ctx).Info("withdrew a bundle without a summary", logkeys.Bundle, w.ID.String())
	return nil
}

// deleteStaleEntries deletes ClusterConfiguration entries that have neither a ClusterSummary nor a bundle on the
// cluster.
func (c *Controller) deleteStaleEntries(ctx context.Context, s *state) error {
	configuration := &configv1beta1.ClusterConfiguration{}
	if err := c.Hub.Get(ctx, summaries.ConfigurationKey(s.member), configuration); err != nil {
		return client.IgnoreNotFound(err)
	}
	// The summaries are listed again, after the entries: a new summary is in the cache before its entry.
	current, err := c.listSummaries(ctx, s.member)
	if err != nil {
		return err
	}
	owners := map[bundle.Owner]bool{}
	for _, summary := range current {
		if owner := metav1.GetControllerOf(summary); owner != nil {
			owners[bundle.Owner{Kind: owner.Kind, Name: owner.Name}] = true
		}
	}
	for _, on := range []fleet.Member{s.member, s.member.OnHub()} {
		c.deleteStaleOn(s, on, configuration.Status, owners)
	}
	return nil
}

// deleteStaleOn deletes the stale entries for the objects on the member or on the hub. owners are the profiles of the
// summaries.
func (c *Controller) deleteStaleOn(s *state, on fleet.Member, listed configv1beta1.ClusterConfigurationStatus, owners map[bundle.Owner]bool) {
	for owner, features := range listedFeatures(listed, on) {
		staleFeatures := slices.DeleteFunc(features, func(feature configv1beta1.DeployedFeature) bool {
			return owners[owner] || slices.ContainsFunc(s.deployed, func(d locatedBundle) bool {
				_, name := splitName(d.Owner)
				return d.location.Mode == on.Mode && d.Owner.Kind == owner.Kind && name == owner.Name && d.ID.Feature == string(feature.FeatureID)
			})
		})
		if len(staleFeatures) == 0 {
			continue
		}
		reference := metav1.OwnerReference{APIVersion: configv1beta1.GroupVersion.String(), Kind: owner.Kind, Name: owner.Name}
		c.Configurations.Set(on, reference, staleFeatures)
	}
}

// listedFeatures returns the features in a ClusterConfiguration by profile, with FeatureID only. For fleet.Member.OnHub
// it returns the features with objects on the hub. For the member it omits features that have only objects on the hub.
func listedFeatures(configuration configv1beta1.ClusterConfigurationStatus, on fleet.Member) map[bundle.Owner][]configv1beta1.DeployedFeature {
	all := map[bundle.Owner][]configv1beta1.DeployedFeature{}
	status.EachDeployedFeature(configuration, func(kind, name string, feature configv1beta1.DeployedFeature) {
		onHub := len(status.ResourcesOf(feature, libv1beta1.DeploymentTypeLocal))
		isElsewhere := onHub == 0
		if on.Mode != fleet.Local {
			isElsewhere = onHub > 0 && onHub == len(feature.Resources) && len(feature.Charts) == 0
		}
		if !isElsewhere {
			owner := bundle.Owner{Kind: kind, Name: name}
			all[owner] = append(all[owner], configv1beta1.DeployedFeature{FeatureID: feature.FeatureID})
		}
	})
	return all
}

// summariesToWithdraw returns the names of summaries in the withdraw annotation of a cluster.
func summariesToWithdraw(cluster client.Object) []string {
	return strings.FieldsFunc(cluster.GetAnnotations()[kube.AnnotationWithdraw], func(r rune) bool { return r == ',' || r == ' ' })
}

// deleteWithdrawAnnotation deletes the withdraw annotation if no withdrawal is in progress. Names of summaries
// that manage their bundles have no effect.
func (c *Controller) deleteWithdrawAnnotation(ctx context.Context, s *state) error {
	requested := summariesToWithdraw(s.cluster)
	if len(requested) == 0 || s.isWithdrawing {
		return nil
	}
	patched := s.cluster.DeepCopyObject().(client.Object)
	annotations := patched.GetAnnotations()
	delete(annotations, kube.AnnotationWithdraw)
	patched.SetAnnotations(annotations)
	// Optimistic locking: names that were added concurrently are not deleted.
	patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
	if err := c.Hub.Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("delete annotation %s: %w", kube.AnnotationWithdraw, err)
	}
	s.cluster = patched
	return nil
}
