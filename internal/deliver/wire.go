package deliver

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// Towline's own labels and annotations on groups and content. The data that a Sveltos agent needs is also in the spec.
const (
	// annotationOutline on a group has the bundleOutline of its bundle as JSON.
	annotationOutline = "towline.dev/bundle"
	// annotationInputs on a group has Bundle.Inputs.
	annotationInputs = "towline.dev/inputs"
	// annotationHeader on content has the header of its chunk.
	annotationHeader = "towline.dev/item"
	// labelManagedBy marks the groups and the content of a Towline hub.
	labelManagedBy = "app.kubernetes.io/managed-by"
	managedBy      = "towline"
)

// missingPrefix is the prefix of the failure message if content is missing.
const missingPrefix = "content is missing"

// IDOf returns the bundle ID of a ConfigurationGroup or ConfigurationBundle; ok is false if obj has none.
func IDOf(obj client.Object) (id bundle.ID, ok bool) {
	labels := obj.GetLabels()
	id = bundle.ID{
		RequestorKind: labels[libv1beta1.PullRequestorKindLabel],
		RequestorName: obj.GetAnnotations()[libv1beta1.PullRequestorNameAnnotation],
		Feature:       labels[libv1beta1.PullRequestorFeatureLabel],
	}
	return id, id.RequestorKind != "" && id.RequestorName != "" && id.Feature != ""
}

// requestorLabels returns the labels of the groups, and of the content that is not shared.
func requestorLabels(m fleet.Member, id bundle.ID) map[string]string {
	return map[string]string{
		libv1beta1.PullClusterNameLabel:      labelValue(m.Name),
		libv1beta1.PullRequestorKindLabel:    id.RequestorKind,
		libv1beta1.PullRequestorFeatureLabel: id.Feature,
		labelManagedBy:                       managedBy,
	}
}

// contentObject returns the ConfigurationBundle of chunk c for id on m in namespace. Shared content has no labels of a
// member.
func contentObject(m fleet.Member, id bundle.ID, namespace string, c chunk) *libv1beta1.ConfigurationBundle {
	obj := &libv1beta1.ConfigurationBundle{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   namespace,
			Name:        c.name,
			Labels:      map[string]string{labelManagedBy: managedBy},
			Annotations: map[string]string{annotationHeader: c.header, libv1beta1.PullIndexAnnotation: indexAnnotationOf(c)},
		},
		Spec: libv1beta1.ConfigurationBundleSpec{
			Payload:                   c.payload,
			ReferencedObjectKind:      c.item.Reference.Kind,
			ReferencedObjectNamespace: c.item.Reference.Namespace,
			ReferencedObjectName:      c.item.Reference.Name,
			ReferenceTier:             c.item.Reference.Tier,
			SkipNamespaceCreation:     c.item.SkipNamespaceCreation,
			Force:                     c.item.Force,
		},
	}
	if c.key != nil {
		obj.Annotations[annotationEncryption] = c.key.id
		obj.Spec.Payload = c.key.encrypt(c.header, c.payload)
	}
	if release := c.item.Release; release != nil {
		obj.Spec.HelmReleaseNamespace = release.Namespace
		obj.Spec.HelmReleaseName = release.Name
		obj.Spec.HelmChartVersion = release.ChartVersion
		obj.Spec.HelmRepoURL = release.RepoURL
		obj.Spec.HelmIcon = release.Icon
		obj.Spec.IsLastHelmReleaseBundle = c.last
	}
	if namespace == m.DeliveryNamespace {
		obj.Labels = requestorLabels(m, id)
		obj.Annotations[libv1beta1.PullRequestorNameAnnotation] = id.RequestorName
	}
	return obj
}

// indexAnnotationOf returns the source of a chunk's item and the number of the chunk. Nothing in Towline reads it: it
// helps people, and Sveltos agents.
func indexAnnotationOf(c chunk) string {
	parts := []string{c.item.Reference.Kind, c.item.Reference.Namespace, c.item.Reference.Name}
	if c.item.Release != nil {
		parts = []string{c.item.Release.Namespace, c.item.Release.Name, c.item.Release.ChartName}
	}
	parts = slices.DeleteFunc(append(parts, strconv.Itoa(c.index)), func(s string) bool { return s == "" })
	return strings.Join(parts, "-")
}

// bundleOutline is a bundle without its items, and with a list of its Helm releases.
type bundleOutline struct {
	bundle.Bundle
	Releases []bundle.DeployedRelease `json:"releases,omitempty"`
}

// deployGroup returns the group that requests m to deploy b. items refer to its content.
func deployGroup(m fleet.Member, b bundle.Bundle, digest bundle.Digest, items []libv1beta1.ConfigurationItem) (*libv1beta1.ConfigurationGroup, error) {
	outline := bundleOutline{Bundle: b, Releases: b.DeployedReleases()}
	if len(outline.Items) > 0 {
		outline.Items = nil // an empty list stays: its digest differs from the digest of nil
	}
	raw, err := json.Marshal(outline)
	if err != nil {
		return nil, fmt.Errorf("encode bundle %s: %w", b.ID, err)
	}
	group := newGroup(m, b.ID)
	group.Annotations[annotationOutline] = string(raw)
	group.Annotations[kube.AnnotationOwnerKind] = b.Owner.Kind
	group.Annotations[kube.AnnotationOwnerName] = b.Owner.Name
	if b.Hub != "" {
		group.Annotations[kube.AnnotationHub] = b.Hub
	}
	if b.Inputs != "" {
		group.Annotations[annotationInputs] = b.Inputs
	}
	group.Spec.Action = libv1beta1.ActionDeploy
	group.Spec.SourceStatus = libv1beta1.SourceActive
	group.Spec.ConfigurationItems = items
	group.Spec.RequestorHash = digest[:]
	group.Spec.Tier = max(1, b.Owner.Tier)
	group.Spec.ContinueOnConflict = b.Options.ContinueOnConflict
	group.Spec.ContinueOnError = b.Options.ContinueOnError
	group.Spec.DriftDetection = b.Options.CorrectDrift
	group.Spec.DriftExclusions = b.Options.DriftExclusions
	setServiceAccount(group, b.Options.ServiceAccount)
	return group, nil
}

// removeGroup returns the group that requests m to withdraw w. existing is the stored group, or an empty one.
func removeGroup(m fleet.Member, w bundle.Withdrawal, existing *libv1beta1.ConfigurationGroup) *libv1beta1.ConfigurationGroup {
	group := newGroup(m, w.ID)
	for _, name := range []string{kube.AnnotationOwnerKind, kube.AnnotationOwnerName, kube.AnnotationHub} {
		if value, ok := existing.Annotations[name]; ok {
			group.Annotations[name] = value
		}
	}
	group.Spec.Action = libv1beta1.ActionRemove
	group.Spec.SourceStatus = libv1beta1.SourceDeleted
	group.Spec.LeavePolicies = w.Orphan
	group.Spec.RequestorHash = existing.Spec.RequestorHash
	setServiceAccount(group, cmp.Or(w.ServiceAccount, serviceAccountOf(existing)))
	return group
}

// setServiceAccount sets the member's ServiceAccount in a group: account is "namespace/name" or "".
func setServiceAccount(group *libv1beta1.ConfigurationGroup, account string) {
	group.Spec.ServiceAccountNamespace, group.Spec.ServiceAccountName, _ = strings.Cut(account, "/")
}

// serviceAccountOf returns the member's ServiceAccount in a group: "namespace/name" or "".
func serviceAccountOf(group *libv1beta1.ConfigurationGroup) string {
	if group.Spec.ServiceAccountName == "" && group.Spec.ServiceAccountNamespace == "" {
		return ""
	}
	return group.Spec.ServiceAccountNamespace + "/" + group.Spec.ServiceAccountName
}

// newGroup returns a group without an action.
func newGroup(m fleet.Member, id bundle.ID) *libv1beta1.ConfigurationGroup {
	return &libv1beta1.ConfigurationGroup{
		TypeMeta: metav1.TypeMeta{APIVersion: libv1beta1.GroupVersion.String(), Kind: libv1beta1.ConfigurationGroupKind},
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   m.DeliveryNamespace,
			Name:        GroupName(m, id),
			Labels:      requestorLabels(m, id),
			Annotations: map[string]string{libv1beta1.PullRequestorNameAnnotation: id.RequestorName},
		},
		Spec: libv1beta1.ConfigurationGroupSpec{
			SourceRef:   &corev1.ObjectReference{Kind: id.RequestorKind, Namespace: m.Namespace, Name: id.RequestorName},
			UpdatePhase: libv1beta1.UpdatePhaseReady,
		},
	}
}

// configurationItem returns the reference to a chunk in the spec of a group.
func configurationItem(namespace string, c chunk) libv1beta1.ConfigurationItem {
	return libv1beta1.ConfigurationItem{
		ContentRef: &corev1.ObjectReference{
			APIVersion: libv1beta1.GroupVersion.String(), Kind: libv1beta1.ConfigurationBundleKind, Namespace: namespace, Name: c.name,
		},
		Hash: c.hash[:],
	}
}

// isObserved returns whether the status of a group is about its current spec. Sveltos agents set no observed
// generation, so only the hash is compared.
func isObserved(group *libv1beta1.ConfigurationGroup) bool {
	status := group.Status
	return (status.ObservedGeneration == 0 || status.ObservedGeneration == group.Generation) &&
		bytes.Equal(status.ObservedRequestorHash, group.Spec.RequestorHash)
}

// ReportOf returns the agent's report about group. A report about an older bundle has the digest of that bundle. A
// status about an older spec with the same hash, for example before a withdrawal was requested, results in a Pending
// report.
func ReportOf(group *libv1beta1.ConfigurationGroup) bundle.Report {
	id, _ := IDOf(group)
	report := bundle.Report{ID: id, State: bundle.StatePending}
	status := group.Status
	if status.DeploymentStatus == "" ||
		(!isObserved(group) && bytes.Equal(status.ObservedRequestorHash, group.Spec.RequestorHash)) {
		return report
	}
	report.Digest = bundle.DigestFromBytes(status.ObservedRequestorHash)
	report.State = stateOf(status)
	report.Message = kube.Truncate(status.FailureMessage, kube.MaxMessage)
	report.Kinds = slices.Clone(status.DeployedGroupVersionKind)
	// In the other states the hub renders no outdated release again.
	if report.State == bundle.StateApplying || report.State == bundle.StateFailed {
		report.Outdated = outdatedOf(status)
	}
	if status.LastAppliedTime != nil {
		report.LastApplied = status.LastAppliedTime.Time
	}
	return report
}

// outdatedOf returns the outdated releases in the status of a group.
func outdatedOf(status libv1beta1.ConfigurationGroupStatus) []bundle.OutdatedRelease {
	var all []bundle.OutdatedRelease
	for _, r := range status.OutdatedReleases {
		all = append(all, bundle.OutdatedRelease{
			Namespace: r.Namespace, Name: r.Name, Revision: int(r.Revision), IsUpgrade: r.IsUpgrade,
		})
	}
	return all
}

// stateOf returns the bundle state in the status of a group.
func stateOf(status libv1beta1.ConfigurationGroupStatus) bundle.State {
	switch status.DeploymentStatus {
	case libv1beta1.FeatureStatusProvisioning:
		if status.ContentMissing {
			return bundle.StateMissing
		}
		return bundle.StateApplying
	case libv1beta1.FeatureStatusProvisioned:
		return bundle.StateApplied
	case libv1beta1.FeatureStatusFailed, libv1beta1.FeatureStatusFailedNonRetriable:
		return bundle.StateFailed
	case libv1beta1.FeatureStatusRemoving, libv1beta1.FeatureStatusAgentRemoving:
		return bundle.StateRemoving
	case libv1beta1.FeatureStatusRemoved:
		return bundle.StateRemoved
	default:
		return bundle.StatePending
	}
}

// featureStatusOf is the reverse of stateOf. StateMissing becomes Provisioning, with ContentMissing set by statusFor.
func featureStatusOf(state bundle.State) libv1beta1.FeatureStatus {
	switch state {
	case bundle.StateApplied:
		return libv1beta1.FeatureStatusProvisioned
	case bundle.StateFailed:
		return libv1beta1.FeatureStatusFailed
	case bundle.StateRemoving:
		return libv1beta1.FeatureStatusRemoving
	case bundle.StateRemoved:
		return libv1beta1.FeatureStatusRemoved
	default:
		return libv1beta1.FeatureStatusProvisioning
	}
}

// statusFor converts report to a status of group. It clears the message and the outdated releases of old; other fields
// that report does not set stay as in old.
func statusFor(group *libv1beta1.ConfigurationGroup, old libv1beta1.ConfigurationGroupStatus, report bundle.Report) libv1beta1.ConfigurationGroupStatus {
	status := *old.DeepCopy()
	status.DeploymentStatus = featureStatusOf(report.State)
	status.ContentMissing = report.State == bundle.StateMissing
	status.FailureMessage = ""
	status.OutdatedReleases = nil
	for _, r := range report.Outdated {
		status.OutdatedReleases = append(status.OutdatedReleases, libv1beta1.OutdatedRelease{
			Namespace: r.Namespace, Name: r.Name, Revision: int64(r.Revision), IsUpgrade: r.IsUpgrade,
		})
	}
	switch {
	case report.State == bundle.StateFailed, report.State == bundle.StateApplied, report.State == bundle.StateApplying:
		status.FailureMessage = kube.Truncate(report.Message, kube.MaxMessage)
	case status.ContentMissing:
		status.FailureMessage = kube.Truncate(strings.TrimSuffix(missingPrefix+": "+report.Message, ": "), kube.MaxMessage)
	}
	status.ObservedRequestorHash = group.Spec.RequestorHash
	status.ObservedGeneration = group.Generation
	if isFromTowline(group) && report.Digest != (bundle.Digest{}) && !bytes.Equal(report.Digest[:], group.Spec.RequestorHash) {
		// The report is about an older bundle: the current generation is not observed yet.
		status.ObservedRequestorHash = report.Digest[:]
		status.ObservedGeneration = old.ObservedGeneration
	}
	if report.State == bundle.StateApplied || report.State == bundle.StateRemoved || len(report.Kinds) > 0 {
		status.DeployedGroupVersionKind = slices.Clone(report.Kinds)
	}
	if !report.LastApplied.IsZero() {
		// The API stores whole seconds.
		status.LastAppliedTime = &metav1.Time{Time: report.LastApplied.UTC().Truncate(time.Second)}
	}
	return status
}

// isFromTowline returns whether a Towline hub has written group. Then spec.requestorHash is the digest of its bundle.
func isFromTowline(group *libv1beta1.ConfigurationGroup) bool {
	return group.Annotations[annotationOutline] != ""
}

// isSameReport returns whether a and b are equal, except for the time of the last run.
func isSameReport(a, b libv1beta1.ConfigurationGroupStatus) bool {
	a.LastAppliedTime, b.LastAppliedTime = nil, nil
	return apiequality.Semantic.DeepEqual(a, b)
}

// hashMatches returns whether reference has the hash of content, a canonicalContent. key is nil if it was not
// encrypted.
func hashMatches(reference libv1beta1.ConfigurationItem, content []byte, key *contentKey) bool {
	sum := sha256.Sum256(content)
	if key != nil {
		sum = key.hash(sum)
	}
	return bytes.Equal(reference.Hash, sum[:])
}
