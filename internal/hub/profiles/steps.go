package profiles

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
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
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/status"
)

// staleDelay is how long a reconcile that saw an old state waits for the cache to catch up.
const staleDelay = 200 * time.Millisecond

// state is what the steps of one reconcile know.
type state struct {
	profile client.Object
	spec    *configv1beta1.ProfileSpec
	status  *configv1beta1.ProfileStatus
	// summaries are those of the profile, by member.
	summaries map[fleet.ID]*configv1beta1.ClusterSummary
	members   []fleet.Member
	// matched says that members is known.
	matched bool
	// unhoused counts the members whose namespace for summaries is not there, or is on its way out.
	unhoused atomic.Int32
	// refusal says why the profile is not acted on, "" if it is.
	refusal  string
	released bool
}

func (r *reconciler) newState(profile client.Object) *state {
	s := &state{profile: profile}
	s.spec, s.status = r.kind.parts(profile)
	return s
}

func (s *state) deleting() bool { return !s.profile.GetDeletionTimestamp().IsZero() }

// served returns the members that have a summary which stays.
func (s *state) served() map[fleet.ID]bool {
	served := make(map[fleet.ID]bool, len(s.summaries))
	for member, summary := range s.summaries {
		served[member] = summary.DeletionTimestamp.IsZero()
	}
	return served
}

// load reads the summaries that the profile owns. Their names say nothing: the owner and the spec do.
func (r *reconciler) load(ctx context.Context, s *state) error {
	var list configv1beta1.ClusterSummaryList
	if err := r.Hub.List(ctx, &list, client.MatchingFields{OwnerIndex: string(s.profile.GetUID())}); err != nil {
		return fmt.Errorf("list summaries: %w", err)
	}
	s.summaries = make(map[fleet.ID]*configv1beta1.ClusterSummary, len(list.Items))
	for i := range list.Items {
		s.summaries[match.Target(&list.Items[i])] = &list.Items[i]
	}
	return nil
}

// hold puts our finalizer on the profile before anything is made for it.
func (r *reconciler) hold(ctx context.Context, s *state) error {
	held := s.profile.DeepCopyObject().(client.Object)
	if !controllerutil.AddFinalizer(held, r.kind.finalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, held, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("add finalizer: %w", err)
	}
	s.profile = held
	s.spec, s.status = r.kind.parts(held)
	return nil
}

// pause leaves everything as it is while people want that. The summaries are told, for they act by themselves.
func (r *reconciler) pause(ctx context.Context, s *state) error {
	if _, paused := s.profile.GetAnnotations()[libv1beta1.ProfilePausedAnnotation]; !paused {
		return nil
	}
	for _, summary := range s.summaries {
		told := summary.DeepCopy()
		metav1.SetMetaDataAnnotation(&told.ObjectMeta, libv1beta1.ProfilePausedAnnotation, "true")
		if err := r.update(ctx, summary, told); err != nil {
			return err
		}
	}
	return phase.Wait{Reason: "paused by annotation " + libv1beta1.ProfilePausedAnnotation}
}

// match finds out for which members there should be a summary.
func (r *reconciler) match(ctx context.Context, s *state) error {
	s.refusal = status.Unsupported(r.Unsupported(*s.spec, s.profile.GetLabels()))
	members, err := fleet.List(ctx, r.Hub)
	if err != nil {
		return err
	}
	matching, err := match.Members(s.spec, s.profile.GetNamespace(), members, s.served())
	if err != nil {
		return phase.Invalid{Err: err}
	}
	s.members, s.matched = matching, true
	return nil
}

// write creates the summaries that are missing and updates those that differ.
func (r *reconciler) write(ctx context.Context, s *state) error {
	// One that cannot be written keeps no other from being written.
	var writes errgroup.Group
	writes.SetLimit(writers)
	for _, m := range s.members {
		writes.Go(func() error {
			have := s.summaries[m.ID()]
			if have == nil {
				return r.create(ctx, s, m)
			}
			if !have.DeletionTimestamp.IsZero() {
				// It is made anew once it is gone.
				return nil
			}
			return r.update(ctx, have, r.desired(s, m, have))
		})
	}
	return writes.Wait()
}

func (r *reconciler) create(ctx context.Context, s *state, m fleet.Member) error {
	summary := r.desired(s, m, &configv1beta1.ClusterSummary{})
	summary.Namespace = m.Namespace
	summary.Name = match.SummaryName(r.kind.name, s.profile.GetName(), m)
	holder := &configv1beta1.ClusterSummary{}
	err := r.Hub.Get(ctx, client.ObjectKeyFromObject(summary), holder)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("look for summary %s: %w", summary.Name, err)
	}
	if err == nil {
		if r.kind.made(holder, s.profile.GetName()) && match.Target(holder) == m.ID() {
			return r.takeOver(ctx, s, m, holder)
		}
		summary.Name = match.DistinctSummaryName(r.kind.name, s.profile.GetName(), m)
	}
	err = r.Hub.Create(ctx, summary, client.FieldOwner(kube.FieldManager))
	if apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		// The namespace comes with the registration, unless that is refused. The other members do not wait for it.
		if m.Refused == "" {
			s.unhoused.Add(1)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("create summary %s: %w", client.ObjectKeyFromObject(summary), err)
	}
	log.FromContext(ctx).Info("cluster matches", logkeys.Member, m.Key(), logkeys.Summary, summary.Name)
	return nil
}

// takeOver makes summary the profile's that a profile of the same name had: the hub was restored, and with it the profile got another uid. Unless
// the garbage collector is faster, nothing is withdrawn only to be deployed again.
func (r *reconciler) takeOver(ctx context.Context, s *state, m fleet.Member, summary *configv1beta1.ClusterSummary) error {
	if !summary.DeletionTimestamp.IsZero() {
		return phase.Wait{Reason: "summary " + summary.Name + " of an earlier " + r.kind.name + " is going away"}
	}
	return r.update(ctx, summary, r.desired(s, m, summary))
}

// desired returns have as it should be for m.
func (r *reconciler) desired(s *state, m fleet.Member, have *configv1beta1.ClusterSummary) *configv1beta1.ClusterSummary {
	want := have.DeepCopy()
	labels, annotations := s.profile.GetLabels(), maps.Clone(s.profile.GetAnnotations())
	delete(annotations, lastApplied)
	want.Labels = merged(without(want.Labels, want.Annotations[copiedLabels]), labels, map[string]string{
		r.kind.label:                match.LabelValue(s.profile.GetName()),
		libv1beta1.ClusterNameLabel: match.LabelValue(m.Name),
		libv1beta1.ClusterTypeLabel: string(m.Type),
	})
	want.Annotations = merged(without(want.Annotations, want.Annotations[copiedAnnotations]), annotations)
	note(want.Annotations, copiedLabels, labels)
	note(want.Annotations, copiedAnnotations, annotations)
	delete(want.Annotations, libv1beta1.ProfilePausedAnnotation)
	want.Annotations[match.AudienceAnnotation] = strconv.Itoa(match.Pulling(s.members))
	want.OwnerReferences = []metav1.OwnerReference{r.kind.owner(s.profile)}
	want.Spec.ClusterNamespace, want.Spec.ClusterName, want.Spec.ClusterType = m.Namespace, m.Name, libv1beta1.ClusterType(m.Type)
	want.Spec.ClusterProfileSpec = specFor(*s.spec, have)
	return want
}

// lastApplied is kubectl's own note on the profile; it would be wrong on a summary.
const lastApplied = "kubectl.kubernetes.io/last-applied-configuration"

// copiedLabels and copiedAnnotations on a summary list the keys that were copied from the profile, so that what is taken off the profile is
// taken off the summary, and what others put there stays.
const (
	copiedLabels      = "towline.dev/copied-labels"
	copiedAnnotations = "towline.dev/copied-annotations"
)

// without returns entries but for the keys in list, which are separated by commas.
func without(entries map[string]string, list string) map[string]string {
	kept := maps.Clone(entries)
	for key := range strings.SplitSeq(list, ",") {
		delete(kept, key)
	}
	return kept
}

// note keeps the keys of copied under name; no keys need no note.
func note(annotations map[string]string, name string, copied map[string]string) {
	delete(annotations, name)
	if len(copied) > 0 {
		annotations[name] = strings.Join(slices.Sorted(maps.Keys(copied)), ",")
	}
}

// merged returns the entries of all maps; later ones override earlier ones.
func merged(parts ...map[string]string) map[string]string {
	all := map[string]string{}
	for _, part := range parts {
		maps.Copy(all, part)
	}
	return all
}

// specFor returns the copy of a profile's spec for a summary. What was deployed OneTime stays as it was deployed, but for what says
// how it is kept and withdrawn.
func specFor(spec configv1beta1.ProfileSpec, have *configv1beta1.ClusterSummary) configv1beta1.ProfileSpec {
	if spec.SyncMode != configv1beta1.SyncModeOneTime || !Provisioned(have) && !lostStatus(have) {
		return *spec.DeepCopy()
	}
	frozen := *have.Spec.ClusterProfileSpec.DeepCopy()
	frozen.SyncMode = spec.SyncMode
	frozen.StopMatchingBehavior = spec.StopMatchingBehavior
	frozen.ClusterSelector = *spec.ClusterSelector.DeepCopy()
	frozen.ClusterRefs = slices.Clone(spec.ClusterRefs)
	return frozen
}

// lostStatus says whether summary was delivered and says nothing of that: the spec that was delivered stays until its status is reported again.
func lostStatus(summary *configv1beta1.ClusterSummary) bool {
	return len(summary.Status.FeatureSummaries) == 0 && controllerutil.ContainsFinalizer(summary, configv1beta1.ClusterSummaryFinalizer)
}

// Provisioned says whether everything that summary asks for was provisioned once.
func Provisioned(summary *configv1beta1.ClusterSummary) bool {
	seen := 0
	for _, feature := range summary.Status.FeatureSummaries {
		switch feature.Status {
		case libv1beta1.FeatureStatusProvisioned:
			seen++
		case libv1beta1.FeatureStatusRemoved:
		default:
			return false
		}
	}
	return seen > 0
}

func (r *reconciler) update(ctx context.Context, have, want *configv1beta1.ClusterSummary) error {
	// A new size of the audience alone is not worth a write to all of it.
	sized := want.DeepCopy()
	if size, ok := have.Annotations[match.AudienceAnnotation]; ok {
		metav1.SetMetaDataAnnotation(&sized.ObjectMeta, match.AudienceAnnotation, size)
	}
	if equality.Semantic.DeepEqual(have, sized) {
		return nil
	}
	if err := r.Hub.Update(ctx, want, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("update summary %s: %w", client.ObjectKeyFromObject(want), err)
	}
	return nil
}

// withdraw deletes the summaries of clusters that match no more; all of them if the profile goes. While the profile is refused nothing
// is known of what it should match, and nothing goes.
func (r *reconciler) withdraw(ctx context.Context, s *state) error {
	matching := map[fleet.ID]bool{}
	for _, m := range s.members {
		matching[m.ID()] = true
	}
	var withdrawals errgroup.Group
	withdrawals.SetLimit(writers)
	for cluster, summary := range s.summaries {
		if matching[cluster] {
			continue
		}
		withdrawals.Go(func() error {
			if s.refusal != "" {
				refused := summary.DeepCopy()
				refused.Spec.ClusterProfileSpec = specFor(*s.spec, summary)
				return r.update(ctx, summary, refused)
			}
			return r.remove(ctx, s, summary)
		})
	}
	return withdrawals.Wait()
}

// settle tries again, later each time, while a namespace is missing: nobody tells when it comes.
func (r *reconciler) settle(_ context.Context, s *state) error {
	if missing := s.unhoused.Load(); missing > 0 {
		return fmt.Errorf("%d of the clusters that match have no namespace for their summary yet", missing)
	}
	return nil
}

// remove deletes a summary, which must know first what is to become of what it deployed.
func (r *reconciler) remove(ctx context.Context, s *state, summary *configv1beta1.ClusterSummary) error {
	last := summary.DeepCopy()
	last.Spec.ClusterProfileSpec.StopMatchingBehavior = s.spec.StopMatchingBehavior
	// Deleting a paused profile means it.
	delete(last.Annotations, libv1beta1.ProfilePausedAnnotation)
	if err := r.update(ctx, summary, last); err != nil {
		return err
	}
	if !summary.DeletionTimestamp.IsZero() {
		return nil
	}
	if err := r.Hub.Delete(ctx, last, client.Preconditions{UID: &last.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete summary %s: %w", client.ObjectKeyFromObject(last), err)
	}
	log.FromContext(ctx).Info("cluster matches no more", logkeys.Member, summary.Spec.ClusterNamespace+"/"+summary.Spec.ClusterName,
		logkeys.Summary, summary.Name)
	return nil
}

// release lets go of a deleted profile once its last summary is gone.
func (r *reconciler) release(ctx context.Context, s *state) error {
	if len(s.summaries) > 0 {
		return phase.Wait{Reason: "summaries are being withdrawn"}
	}
	free := s.profile.DeepCopyObject().(client.Object)
	if !controllerutil.RemoveFinalizer(free, r.kind.finalizer) {
		return nil
	}
	patch := client.MergeFromWithOptions(s.profile, client.MergeFromWithOptimisticLock{})
	if err := r.Hub.Patch(ctx, free, patch, client.FieldOwner(kube.FieldManager)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove finalizer: %w", err)
	}
	s.released = true
	return nil
}
