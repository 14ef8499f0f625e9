package release

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"helm.sh/helm/v4/pkg/release/common"
	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/kube"
)

// The labels that Helm's storage driver sets on the Secret of a record, and the Secret's type.
const (
	labelName       = "name"
	labelOwner      = "owner"
	labelStatus     = "status"
	labelVersion    = "version"
	labelCreatedAt  = "createdAt"
	labelModifiedAt = "modifiedAt"
	ownerHelm       = "helm"
	dataKey         = "release"

	secretType = corev1.SecretType("helm.sh/release.v1")
)

// SystemLabels are the labels that a release cannot set on its records.
func SystemLabels() []string {
	return []string{labelName, labelOwner, labelStatus, labelVersion, labelCreatedAt, labelModifiedAt}
}

// Key identifies a release in a cluster.
type Key struct{ Namespace, Name string }

// String prints the key as namespace/name.
func (k Key) String() string { return k.Namespace + "/" + k.Name }

// SecretName returns the name of the Secret that holds the record of a revision.
func SecretName(name string, revision int) string {
	return fmt.Sprintf("sh.helm.release.v1.%s.v%d", name, revision)
}

// Store reads and writes the release records of one cluster.
type Store struct {
	Secrets  corev1client.SecretsGetter
	Metadata metadata.Interface
	Clock    clock.PassiveClock
	// Labels and Annotations are added to every Secret that Put writes.
	Labels, Annotations map[string]string
	// Memory limits the memory of records that are read: each has a Reservation for the same namespace. Nil means no
	// limit.
	Memory *kube.Reservation
}

const (
	// MaxEntries limits the entries of a release, which are in memory during an operation. By default, the helm command
	// keeps 10 revisions.
	MaxEntries = 5000
	// maxListed limits the Secrets and pages that List reads.
	maxListed = 20_000
)

// maxValue limits each namespace, name, UID, label and annotation of an Entry, in bytes. The longest value is the
// requestor, a bundle.ID.
const maxValue = 1 << 10

// Entry is the metadata of a recorded revision, from the labels of its Secret.
type Entry struct {
	Key
	Revision int
	Status   common.Status
	// Secret is the part of the metadata of the Secret that NextRendering, Store and the callers read.
	Secret metav1.ObjectMeta
}

// ParseEntry reads the metadata of a Secret. ok is false if the Secret is not a release record.
func ParseEntry(secret metav1.ObjectMeta) (entry Entry, ok bool) {
	secret = trimMetadata(secret)
	// With at most 32 bits, the revision can be incremented without an overflow.
	version, err := strconv.ParseInt(secret.Labels[labelVersion], 10, 32)
	revision := int(version)
	entry = Entry{
		Key:      Key{Namespace: secret.Namespace, Name: secret.Labels[labelName]},
		Revision: revision, Status: common.Status(secret.Labels[labelStatus]), Secret: secret,
	}
	isRecord := err == nil && revision > 0 && secret.Labels[labelOwner] == ownerHelm && secret.Name == SecretName(entry.Name, revision)
	return entry, isRecord && max(len(secret.Namespace), len(secret.Name), len(secret.UID)) <= maxValue
}

// trimMetadata returns the part of the metadata of a Secret that this program reads. It omits labels and annotations
// with more than maxValue bytes.
func trimMetadata(secret metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: secret.Namespace, Name: secret.Name, UID: secret.UID, CreationTimestamp: secret.CreationTimestamp,
		Labels:      selectValues(secret.Labels, append(SystemLabels(), kube.LabelReason)...),
		Annotations: selectValues(secret.Annotations, kube.AnnotationRequestor, kube.AnnotationHub, kube.AnnotationScope, annotationRendering),
	}
}

// selectValues returns the entries of all with these names and with values of at most maxValue bytes.
func selectValues(all map[string]string, names ...string) map[string]string {
	used := make(map[string]string, len(names))
	for _, name := range names {
		if value, ok := all[name]; ok && len(value) <= maxValue {
			used[name] = value
		}
	}
	return used
}

// Modified returns the time of the last write of the record: the label of Helm, or else the creation time of the
// Secret.
func (e Entry) Modified() time.Time {
	for _, label := range []string{labelModifiedAt, labelCreatedAt} {
		if seconds, err := strconv.ParseInt(e.Secret.Labels[label], 10, 64); err == nil {
			return time.Unix(seconds, 0)
		}
	}
	return e.Secret.CreationTimestamp.Time
}

// List returns the recorded revisions of a release, oldest first. If there are more than MaxEntries, it returns the
// last ones. It reads metadata only.
func (s Store) List(ctx context.Context, key Key) ([]Entry, error) {
	var entries []Entry
	sortAndLimit := func() {
		slices.SortFunc(entries, func(a, b Entry) int { return a.Revision - b.Revision })
		entries = slices.Delete(entries, 0, max(0, len(entries)-MaxEntries))
	}
	secrets := s.Metadata.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace(key.Namespace)
	selector, limit := labels.Set{labelOwner: ownerHelm, labelName: key.Name}.String(), kube.NewObjectLimit(maxListed, "release records")
	err := kube.EachMetadata(ctx, secrets, selector, limit, func(secret *metav1.PartialObjectMetadata) error {
		if entry, ok := ParseEntry(secret.ObjectMeta); ok {
			entries = append(entries, entry)
		}
		if len(entries) == 2*MaxEntries {
			sortAndLimit()
		}
		return limit.Add(0)
	})
	if err != nil {
		return nil, fmt.Errorf("list the records of release %s: %w", key, err)
	}
	sortAndLimit()
	return entries, nil
}

// Get reads the record of a revision. ok is false if the record does not exist or cannot be decoded. It fails if there
// is not enough memory. If ok is true, the caller must close the record.
func (s Store) Get(ctx context.Context, key Key, revision int) (record *StoredRecord, ok bool, err error) {
	secret, err := s.Secrets.Secrets(key.Namespace).Get(ctx, SecretName(key.Name, revision), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err == nil {
		record, ok, err = decodeSecret(ctx, secret, key, revision, s.Memory)
	}
	if err != nil {
		return nil, false, fmt.Errorf("read the record of release %s, revision %d: %w", key, revision, err)
	}
	return record, ok, nil
}

// decodeSecret returns the record in a Secret. ok is false if the Secret holds no valid record, or a record of another
// release or revision: with such a record, a user who may write Secrets in one namespace could make the engine write
// Secrets in all others.
func decodeSecret(ctx context.Context, secret *corev1.Secret, key Key, revision int, memory *kube.Reservation) (record *StoredRecord, ok bool, err error) {
	memory = memory.ForSameNamespace()
	defer func() {
		if !ok {
			memory.Close()
		}
	}()
	record, err = decode(ctx, secret.Data[dataKey], memory)
	if err != nil {
		return nil, false, ignoreInvalid(err)
	}
	if record.Info == nil || record.Namespace != key.Namespace || record.Name != key.Name || record.Version != revision {
		return nil, false, nil
	}
	record.Labels = map[string]string{}
	for name, value := range secret.Labels {
		if !slices.Contains(SystemLabels(), name) {
			record.Labels[name] = value
		}
	}
	return record, true, nil
}

func ignoreInvalid(err error) error {
	if errors.Is(err, errInvalid) {
		return nil
	}
	return err
}

// Put creates or replaces the record of a revision, and returns the metadata of its Secret.
func (s Store) Put(ctx context.Context, record *helm.Release) (metav1.ObjectMeta, error) {
	encoded, err := encode(record)
	if err != nil {
		return metav1.ObjectMeta{}, err
	}
	api := s.Secrets.Secrets(record.Namespace)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: record.Namespace, Name: SecretName(record.Name, record.Version),
			Labels: map[string]string{}, Annotations: s.Annotations,
		},
		Type: secretType,
		Data: map[string][]byte{dataKey: encoded},
	}
	maps.Copy(secret.Labels, record.Labels)
	maps.Copy(secret.Labels, s.Labels)
	maps.Copy(secret.Labels, map[string]string{
		labelName: record.Name, labelOwner: ownerHelm,
		labelStatus: record.Info.Status.String(), labelVersion: strconv.Itoa(record.Version),
		labelModifiedAt: strconv.FormatInt(s.Clock.Now().Unix(), 10),
	})
	create := func() (*corev1.Secret, error) {
		created := secret.DeepCopy()
		delete(created.Labels, labelModifiedAt)
		created.Labels[labelCreatedAt] = strconv.FormatInt(s.Clock.Now().Unix(), 10)
		return api.Create(ctx, created, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	update := func() (*corev1.Secret, error) {
		return api.Update(ctx, secret, metav1.UpdateOptions{FieldManager: kube.FieldManager})
	}
	var written *corev1.Secret
	if record.Info.Status.IsPending() {
		// The status is pending when a revision begins, so it rarely has a record yet.
		if written, err = create(); apierrors.IsAlreadyExists(err) {
			written, err = update()
		}
	} else if written, err = update(); apierrors.IsNotFound(err) {
		written, err = create()
	}
	if err != nil {
		return metav1.ObjectMeta{}, fmt.Errorf("write the record of release %s/%s, revision %d: %w",
			record.Namespace, record.Name, record.Version, err)
	}
	return written.ObjectMeta, nil
}

// Supersede sets the status of the deployed revisions in entries to superseded, except for one revision.
func (s Store) Supersede(ctx context.Context, entries []Entry, except int) error {
	for _, entry := range entries {
		if entry.Revision == except || entry.Status != common.StatusDeployed {
			continue
		}
		if err := s.SetStatus(ctx, entry, common.StatusSuperseded, ""); err != nil {
			return err
		}
	}
	return nil
}

// SetStatus sets the status of a revision that is no longer the current one, and its description unless it is empty. It
// removes s.Labels and s.Annotations from the Secret, since they describe the current revision. It does nothing for a
// record that does not exist or cannot be decoded. If the record needs too much memory, it sets only the label with the
// status.
func (s Store) SetStatus(ctx context.Context, entry Entry, status common.Status, description string) error {
	record, ok, err := s.Get(ctx, entry.Key, entry.Revision)
	if errors.Is(err, kube.ErrTooMuchMemory) {
		return s.patchStatusLabel(ctx, entry, status)
	}
	if err != nil || !ok {
		return err
	}
	defer record.Close()
	record.Info.Status = status
	if status == common.StatusUninstalled {
		record.Info.Deleted = s.Clock.Now()
	}
	if description != "" {
		record.Info.Description = description
	}
	unlabelled := s
	unlabelled.Labels, unlabelled.Annotations = nil, nil
	for name := range s.Labels {
		delete(record.Labels, name)
	}
	_, err = unlabelled.Put(ctx, record.Release)
	return err
}

// patchStatusLabel is SetStatus without reading the record: it sets the status only in the label of the Secret.
func (s Store) patchStatusLabel(ctx context.Context, entry Entry, status common.Status) error {
	labels, annotations := map[string]any{labelStatus: status}, map[string]any{}
	for name := range s.Labels {
		labels[name] = nil
	}
	for name := range s.Annotations {
		annotations[name] = nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": entry.Secret.UID, "labels": labels, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("encode the labels of release %s, revision %d: %w", entry.Key, entry.Revision, err)
	}
	_, err = s.Secrets.Secrets(entry.Namespace).Patch(ctx, SecretName(entry.Name, entry.Revision), types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("write the labels of release %s, revision %d: %w", entry.Key, entry.Revision, err)
	}
	return nil
}

// Prune deletes the records in entries, which are sorted, except for the last limit ones and the record of revision
// keep. A limit of zero means no limit.
func (s Store) Prune(ctx context.Context, key Key, entries []Entry, limit, keep int) error {
	if limit <= 0 {
		return nil
	}
	for _, entry := range entries[:max(len(entries)-limit, 0)] {
		if entry.Revision == keep {
			continue
		}
		if err := s.delete(ctx, key, entry); err != nil {
			return err
		}
	}
	return nil
}

// Delete deletes all records in entries.
func (s Store) Delete(ctx context.Context, key Key, entries []Entry) error {
	for _, entry := range entries {
		if err := s.delete(ctx, key, entry); err != nil {
			return err
		}
	}
	return nil
}

func (s Store) delete(ctx context.Context, key Key, entry Entry) error {
	err := s.Secrets.Secrets(key.Namespace).Delete(ctx, entry.Secret.Name,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: uidOrNil(entry.Secret.UID)}})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the record of release %s, revision %d: %w", key, entry.Revision, err)
	}
	return nil
}

func uidOrNil(uid types.UID) *types.UID {
	if uid == "" {
		return nil
	}
	return &uid
}
