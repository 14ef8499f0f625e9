package profiles

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/status"
)

// staleDelay is the delay before a reconcile with a stale cache is retried.
const staleDelay = 200 * time.Millisecond

// state is shared by the steps of one reconcile.
type state struct {
	profile client.Object
	spec    *configv1beta1.ProfileSpec
	status  *configv1beta1.ProfileStatus
	// summaries has the summaries of the profile by member.
	summaries map[fleet.ID]*configv1beta1.ClusterSummary
	// members has the members that must have a summary. It is valid if matched is true. pullMembers is the number of pull
	// members in it, for match.PullMembersAnnotation.
	members     []fleet.Member
	matched     bool
	pullMembers int
	// unsupported is the reason why the profile is not supported, "" if it is.
	unsupported string

	// mu guards the fields below, which concurrent writes of summaries set.
	mu sync.Mutex
	// withoutNamespace is the number of members whose namespace for summaries does not exist or is being deleted.
	withoutNamespace int
	// terminating is the name of a summary of an earlier profile that is still being deleted: the first one by name, ""
	// if there is none.
	terminating string
}

func (r *reconciler) newState(profile client.Object) *state {
	s := &state{profile: profile}
	s.spec, s.status = r.kind.specAndStatus(profile)
	return s
}

func (s *state) isDeleting() bool { return !s.profile.GetDeletionTimestamp().IsZero() }

// membersWithSummary returns true for each member with a summary that is not being deleted.
func (s *state) membersWithSummary() map[fleet.ID]bool {
	members := make(map[fleet.ID]bool, len(s.summaries))
	for member, summary := range s.summaries {
		members[member] = summary.DeletionTimestamp.IsZero()
	}
	return members
}

// load reads the summaries that the profile owns. Their owner and spec identify them, not their names. They are from
// the cache and must not be changed. Only a user can create a second summary for a member: then one of both is ignored
// until the other one is deleted.
func (r *reconciler) load(ctx context.Context, s *state) error {
	var list configv1beta1.ClusterSummaryList
	owner := summaries.ProfileIndexKey(r.kind.name, s.profile.GetNamespace(), s.profile.GetUID())
	if err := r.Hub.List(ctx, &list, client.MatchingFields{summaries.ProfileIndex: owner}, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list summaries: %w", err)
	}
	s.summaries = make(map[fleet.ID]*configv1beta1.ClusterSummary, len(list.Items))
	for i := range list.Items {
		s.summaries[match.MemberID(&list.Items[i])] = &list.Items[i]
	}
	return nil
}

// ensureFinalizer sets the finalizer on the profile before any summary is created.
func (r *reconciler) ensureFinalizer(ctx context.Context, s *state) error {
	changed := s.profile.DeepCopyObject().(client.Object)
	if !controllerutil.AddFinalizer(changed, r.kind.finalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.profile = changed
	s.spec, s.status = r.kind.specAndStatus(changed)
	return nil
}

// stopIfPaused stops the reconcile of a paused profile, after it has set the pause annotation on the summaries. It
// skips summaries that are being deleted: the pause must not prevent their withdrawal.
func (r *reconciler) stopIfPaused(ctx context.Context, s *state) error {
	if _, paused := s.profile.GetAnnotations()[libv1beta1.ProfilePausedAnnotation]; !paused {
		return nil
	}
	for _, summary := range s.summaries {
		if !summary.DeletionTimestamp.IsZero() {
			continue
		}
		annotated := summary.DeepCopy()
		metav1.SetMetaDataAnnotation(&annotated.ObjectMeta, libv1beta1.ProfilePausedAnnotation, "true")
		if err := r.update(ctx, summary, annotated); err != nil {
			return err
		}
	}
	return phase.Wait{Reason: "paused by annotation " + libv1beta1.ProfilePausedAnnotation}
}

// match determines the members that must have a summary.
func (r *reconciler) match(ctx context.Context, s *state) error {
	s.unsupported = status.UnsupportedMessage(r.Unsupported(*s.spec))
	selection, err := r.selections.get(r.kind, s.profile)
	if err != nil {
		return phase.TerminalError{Err: err}
	}
	members, err := fleet.List(ctx, r.Hub)
	if err != nil {
		return err
	}
	// A member with a summary matches also if it is not ready.
	s.members, s.matched = selection.Members(members, s.membersWithSummary()), true
	s.pullMembers = match.CountPull(s.members)
	return nil
}

// writeSummaries creates missing summaries, updates different ones, and deletes the summaries of clusters that do not
// match. After a failed write it continues with the others.
func (r *reconciler) writeSummaries(ctx context.Context, s *state) error {
	var group errgroup.Group
	group.SetLimit(maxConcurrentWrites)
	matching := map[fleet.ID]bool{}
	for _, m := range s.members {
		matching[m.ID()] = true
		group.Go(func() error {
			existing := s.summaries[m.ID()]
			if existing == nil {
				return r.create(ctx, s, m)
			}
			if !existing.DeletionTimestamp.IsZero() {
				// The delete event triggers a reconcile, which creates it again.
				return nil
			}
			return r.update(ctx, existing, r.desired(s, m, existing))
		})
	}
	// While the profile is unsupported, nothing is deleted: the fields that are not supported may select more clusters.
	writeUnmatched := r.deleteSummary
	if s.unsupported != "" {
		writeUnmatched = r.updateSpec
	}
	for cluster, summary := range s.summaries {
		if !matching[cluster] {
			group.Go(func() error { return writeUnmatched(ctx, s, summary) })
		}
	}
	return group.Wait()
}

// updateSpec updates the spec of a summary.
func (r *reconciler) updateSpec(ctx context.Context, s *state, summary *configv1beta1.ClusterSummary) error {
	updated := summary.DeepCopy()
	updated.Spec.ClusterProfileSpec = r.specFor(s, summary)
	return r.update(ctx, summary, updated)
}

// create creates the summary for m, or takes over the summary of an earlier profile with the same name. A new summary
// is named match.SummaryName, or match.DistinctSummaryName if a summary of another profile has the first name.
func (r *reconciler) create(ctx context.Context, s *state, m fleet.Member) error {
	// The loop ends with match.SummaryName, so that a new summary gets this name if both are free.
	free := ""
	for _, name := range []string{match.DistinctSummaryName(r.kind.name, s.profile.GetName(), m), match.SummaryName(r.kind.name, s.profile.GetName(), m)} {
		existing := &configv1beta1.ClusterSummary{}
		switch err := r.Hub.Get(ctx, client.ObjectKey{Namespace: m.Namespace, Name: name}, existing); {
		case apierrors.IsNotFound(err):
			free = name
		case err != nil:
			return fmt.Errorf("read summary %s: %w", name, err)
		case r.kind.isCreatedFor(existing, s.profile.GetName()) && match.MemberID(existing) == m.ID():
			return r.takeOver(ctx, s, m, existing)
		}
	}
	if free == "" {
		return fmt.Errorf("create summary for %s: other profiles have summaries with both of its names", m.Key())
	}
	return r.createNamed(ctx, s, m, free)
}

func (r *reconciler) createNamed(ctx context.Context, s *state, m fleet.Member, name string) error {
	summary := r.desired(s, m, &configv1beta1.ClusterSummary{}).DeepCopy()
	summary.Namespace, summary.Name = m.Namespace, name
	fleet.Shard(m.Shard).SetLabel(summary)
	if isDeliveredAtOnce(s, m) {
		controllerutil.AddFinalizer(summary, configv1beta1.ClusterSummaryFinalizer)
	}
	err := r.Hub.Create(ctx, summary, client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		// The hub creates the namespace of a Cluster later, but never for a refused Cluster. The namespace of a
		// SveltosCluster exists, but may be terminating. retryIfNotCreated returns an error after all other members.
		if m.Refused == "" {
			s.mu.Lock()
			s.withoutNamespace++
			s.mu.Unlock()
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("create summary %s: %w", client.ObjectKeyFromObject(summary), err)
	}
	log.FromContext(ctx).Info("created summary for matching cluster", logkeys.Member, m.Key(), logkeys.Summary, summary.Name)
	return nil
}

// isDeliveredAtOnce returns whether a new summary for m is probably delivered at once. Such a summary is created with
// the finalizer, which saves a request. Otherwise the summary controller adds the finalizer before the first delivery,
// so that a summary without a delivery can be deleted while its member is unreachable. For OneTime it is false, because
// mayHaveBeenDelivered takes the finalizer as a sign of a delivery. m.HasFinalizer is about the cluster object.
func isDeliveredAtOnce(s *state, m fleet.Member) bool {
	return s.spec.SyncMode != configv1beta1.SyncModeOneTime && s.unsupported == "" &&
		m.Ready && m.Refused == "" && !m.Down && !m.Paused && m.HasFinalizer
}

// takeOver makes the profile the owner of a summary of an earlier profile with the same name. After a restore of the
// hub the profile has a new UID, and without takeOver the deployments would be withdrawn and deployed again. If the
// summary is being deleted already, by the garbage collector, the profile waits.
func (r *reconciler) takeOver(ctx context.Context, s *state, m fleet.Member, summary *configv1beta1.ClusterSummary) error {
	if !summary.DeletionTimestamp.IsZero() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.terminating == "" || summary.Name < s.terminating {
			s.terminating = summary.Name
		}
		return nil
	}
	return r.update(ctx, summary, r.desired(s, m, summary))
}

// desired returns existing with the desired metadata and spec for m. The caller must not modify the result: it shares
// memory with existing and the profile, since copies of thousands of unchanged summaries would be expensive.
func (r *reconciler) desired(s *state, m fleet.Member, existing *configv1beta1.ClusterSummary) *configv1beta1.ClusterSummary {
	result := *existing
	labels, annotations := maps.Clone(s.profile.GetLabels()), maps.Clone(s.profile.GetAnnotations())
	delete(annotations, lastApplied)
	// Package shards writes this label.
	delete(labels, fleet.LabelShard)
	result.Labels = merged(withoutKeys(existing.Labels, existing.Annotations[annotationCopiedLabels]), labels, map[string]string{
		r.kind.label:                match.LabelValue(s.profile.GetName()),
		libv1beta1.ClusterNameLabel: match.LabelValue(m.Name),
		libv1beta1.ClusterTypeLabel: string(m.Type),
	})
	result.Annotations = merged(withoutKeys(existing.Annotations, existing.Annotations[annotationCopiedAnnotations]), annotations)
	setCopied(result.Annotations, annotationCopiedLabels, labels)
	setCopied(result.Annotations, annotationCopiedAnnotations, annotations)
	delete(result.Annotations, libv1beta1.ProfilePausedAnnotation)
	// Package summaries decides by this number where the content for pull members is stored.
	result.Annotations[match.PullMembersAnnotation] = strconv.Itoa(s.pullMembers)
	result.OwnerReferences = []metav1.OwnerReference{r.kind.ownerReference(s.profile)}
	result.Spec.ClusterNamespace, result.Spec.ClusterName, result.Spec.ClusterType = m.Namespace, m.Name, libv1beta1.ClusterType(m.Type)
	result.Spec.ClusterProfileSpec = r.specFor(s, existing)
	return &result
}

// lastApplied is the annotation of kubectl apply, which must not be copied from the profile to a summary.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// annotationCopiedLabels and annotationCopiedAnnotations are annotations on a summary. They list the keys that were
// copied from the profile. If a key is deleted from the profile, it is deleted from the summary; keys of others stay.
const (
	annotationCopiedLabels      = "towline.dev/copied-labels"
	annotationCopiedAnnotations = "towline.dev/copied-annotations"
)

// withoutKeys returns entries without the keys in the comma-separated list keys.
func withoutKeys(entries map[string]string, keys string) map[string]string {
	kept := maps.Clone(entries)
	for key := range strings.SplitSeq(keys, ",") {
		delete(kept, key)
	}
	return kept
}

// setCopied sets annotations[annotation] to the keys of copied, or deletes it if there are none.
func setCopied(annotations map[string]string, annotation string, copied map[string]string) {
	delete(annotations, annotation)
	if len(copied) > 0 {
		annotations[annotation] = strings.Join(slices.Sorted(maps.Keys(copied)), ",")
	}
}

// merged returns the entries of all maps. Later maps override earlier ones.
func merged(parts ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, part := range parts {
		maps.Copy(all, part)
	}
	return all
}

// specFor returns the spec for a summary. A OneTime summary that was delivered keeps its spec, except for the fields
// that determine its matching and withdrawal. All other summaries get the spec of the profile. This
// includes a OneTime summary whose owner reference does not name the profile: another client may have written its spec.
// The result shares memory with the profile and existing.
func (r *reconciler) specFor(s *state, existing *configv1beta1.ClusterSummary) configv1beta1.ProfileSpec {
	spec := *s.spec
	wasDelivered := isProvisioned(existing) || mayHaveBeenDelivered(existing)
	if spec.SyncMode != configv1beta1.SyncModeOneTime || !wasDelivered || !r.kind.isOwnedByName(existing, s.profile.GetName()) {
		return spec
	}
	kept := existing.Spec.ClusterProfileSpec
	kept.SyncMode = spec.SyncMode
	kept.StopMatchingBehavior = spec.StopMatchingBehavior
	kept.ClusterSelector = spec.ClusterSelector
	kept.ClusterRefs = spec.ClusterRefs
	return kept
}

// mayHaveBeenDelivered returns whether a OneTime summary has the finalizer, but no status: its status is not written
// yet, or was lost in a restore. Its spec stays until its status is reported.
func mayHaveBeenDelivered(summary *configv1beta1.ClusterSummary) bool {
	isOneTime := summary.Spec.ClusterProfileSpec.SyncMode == configv1beta1.SyncModeOneTime
	return isOneTime && len(summary.Status.FeatureSummaries) == 0 && controllerutil.ContainsFinalizer(summary, configv1beta1.ClusterSummaryFinalizer)
}

// isProvisioned returns whether summary has a provisioned feature, and all other features are provisioned or removed.
func isProvisioned(summary *configv1beta1.ClusterSummary) bool {
	provisioned := 0
	for _, feature := range summary.Status.FeatureSummaries {
		switch feature.Status {
		case libv1beta1.FeatureStatusProvisioned:
			provisioned++
		case libv1beta1.FeatureStatusRemoved:
		default:
			return false
		}
	}
	return provisioned > 0
}

// update writes changed if it differs from existing. It copies changed, which can share memory with the cache.
func (r *reconciler) update(ctx context.Context, existing, changed *configv1beta1.ClusterSummary) error {
	// A change of PullMembersAnnotation alone does not justify a write to every summary: it may be outdated.
	withSameCount := *changed
	if count, ok := existing.Annotations[match.PullMembersAnnotation]; ok {
		withSameCount.Annotations = merged(changed.Annotations, map[string]string{match.PullMembersAnnotation: count})
	}
	if equality.Semantic.DeepEqual(existing, &withSameCount) {
		return nil
	}
	written := changed.DeepCopy()
	kube.DropManagedFields(written)
	if err := r.Hub.Update(ctx, written, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("update summary %s: %w", client.ObjectKeyFromObject(changed), err)
	}
	return nil
}

// retryIfNotCreated returns an error while the namespace of a summary is missing, so that the reconcile is retried with
// backoff: there is no watch on namespaces. While a summary of an earlier profile is being deleted, it returns a
// phase.Wait with a delay, since the deletion triggers no reconcile if the summary has no owner reference.
func (r *reconciler) retryIfNotCreated(_ context.Context, s *state) error {
	if s.withoutNamespace > 0 {
		return fmt.Errorf("%d matching clusters have no namespace for their summary yet", s.withoutNamespace)
	}
	if s.terminating != "" {
		return phase.Wait{After: retryMax, Reason: r.terminatingReason(s)}
	}
	return nil
}

// terminatingReason returns the reason to suspend the profile for state.terminating, "" if there is none.
func (r *reconciler) terminatingReason(s *state) string {
	if s.terminating == "" {
		return ""
	}
	return "summary " + s.terminating + " of an earlier " + r.kind.name + " is being deleted"
}

// deleteSummary deletes a summary after it has updated the fields that determine its withdrawal.
func (r *reconciler) deleteSummary(ctx context.Context, s *state, summary *configv1beta1.ClusterSummary) error {
	updated := summary.DeepCopy()
	updated.Spec.ClusterProfileSpec.StopMatchingBehavior = s.spec.StopMatchingBehavior
	// The pause must not prevent the withdrawal.
	delete(updated.Annotations, libv1beta1.ProfilePausedAnnotation)
	if err := r.update(ctx, summary, updated); err != nil {
		return err
	}
	if !summary.DeletionTimestamp.IsZero() {
		return nil
	}
	err := r.Hub.Delete(ctx, updated, client.Preconditions{UID: &updated.UID})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete summary %s: %w", client.ObjectKeyFromObject(updated), err)
	}
	log.FromContext(ctx).Info("deleted summary", logkeys.Member, summary.Spec.ClusterNamespace+"/"+summary.Spec.ClusterName,
		logkeys.Summary, summary.Name)
	return nil
}

// removeFinalizer removes the finalizer of a deleted profile after its last summary is deleted.
func (r *reconciler) removeFinalizer(ctx context.Context, s *state) error {
	if len(s.summaries) > 0 {
		return phase.Wait{Reason: "summaries are being withdrawn"}
	}
	changed := s.profile.DeepCopyObject().(client.Object)
	if !controllerutil.RemoveFinalizer(changed, r.kind.finalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, changed, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	return nil
}
