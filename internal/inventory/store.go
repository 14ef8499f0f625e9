package inventory

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"
	toolscache "k8s.io/client-go/tools/cache"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// labelRecord is on every Secret of a record; its values are partHead and partChunk.
	labelRecord = "towline.dev/record"
	partHead    = "head"
	partChunk   = "chunk"
	// labelRecordOf names the head that a chunk belongs to.
	labelRecordOf = "towline.dev/record-of"

	// labelRecordScope distinguishes records of different scopes, labelRecordHub records of different hubs. Records of the
	// zero OwnerScope have neither.
	labelRecordScope = "towline.dev/record-scope"
	labelRecordHub   = "towline.dev/record-hub"
	// labelRecordPartition is on the head of a record of a Store with Partitions. Its value is a hash of the partition.
	labelRecordPartition = "towline.dev/record-partition"

	// The keys in the Secrets.
	keyHead    = "head"
	keyContent = "content"
	keyEntries = "inventory"
	keyChunk   = "chunk"

	// A Secret holds at most 1 MiB. Content and entries up to these sizes (in bytes, compressed) share the head Secret,
	// so that a small bundle costs one write.
	maxInlineContent = 256 << 10
	maxInlineEntries = 384 << 10
	chunkSize        = 900 << 10

	// namePrefix begins the names of the Secrets. A hash of hashLength characters follows.
	namePrefix = "towline-record-"
	hashLength = 20
	// pageSize is the maximum number of Secrets in the response to a list, and metadataPageSize of their metadata. A head
	// Secret can have a MiB.
	pageSize         = 50
	metadataPageSize = 500
)

// ErrIncomplete is in the error for a record with a missing or invalid part: others have deleted or changed its
// Secrets.
var ErrIncomplete = errors.New("the record is incomplete")

// Store keeps the records of one OwnerScope in Secrets of one namespace, and caches them. It is safe for concurrent
// use, but Load, Save and Delete must not run at the same time for the same bundle ID.
type Store struct {
	scope      OwnerScope
	namespace  string
	secrets    corev1client.SecretInterface
	metadata   metadata.ResourceInterface // of the same Secrets
	namespaces corev1client.NamespaceInterface
	// changed is the channel of Changes.
	changed chan struct{}
	// These compress the two values of a record.
	contentCompressor, entryCompressor compressor

	cache *recordCache
	// memory limits the memory of records; nil means no limit.
	memory *kube.Reservation
	// partitions is nil if the Store has all records of the scope.
	partitions *Partitions
	// listing is a lock, which is held while it has a value: only one caller lists records at a time.
	listing chan struct{}
}

// NewStore returns a Store of all records of a scope in a namespace, which is created with the first record. It makes
// no request.
func NewStore(core corev1client.CoreV1Interface, objects metadata.Interface, namespace string, scope OwnerScope) *Store {
	return &Store{
		scope: scope, namespace: namespace, secrets: core.Secrets(namespace), namespaces: core.Namespaces(),
		metadata: objects.Resource(corev1.SchemeGroupVersion.WithResource("secrets")).Namespace(namespace),
		changed:  make(chan struct{}, 1), cache: newRecordCache(), listing: make(chan struct{}, 1),
		contentCompressor: compressor{limit: maxContent}, entryCompressor: compressor{limit: maxEntries},
	}
}

// NewPartitionedStore is NewStore for the records of the partitions that this process serves: see Serve and List. If
// partitions is nil, the Store has all records.
func NewPartitionedStore(core corev1client.CoreV1Interface, objects metadata.Interface, namespace string, scope OwnerScope, partitions *Partitions) *Store {
	s := NewStore(core, objects, namespace, scope)
	s.partitions = partitions
	return s
}

// Scope returns the scope of the records.
func (s *Store) Scope() OwnerScope { return s.scope }

// IsHubCluster returns whether the Store is on the cluster of the hub, which has the objects of all clusters for
// deploymentType Local. Only such a Store is created with Partitions.
func (s *Store) IsHubCluster() bool { return s.partitions != nil }

// Changes returns a channel that has a value when the cached records have changed since a value was last received. It
// has one receiver.
func (s *Store) Changes() <-chan struct{} { return s.changed }

func (s *Store) notify() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// headName returns the name of the head Secret of id.
func (s *Store) headName(id bundle.ID) string {
	return namePrefix + shortHash([]byte(s.scope.OwnerKey(id)))
}

// headNameFrom returns the name of the head Secret of a record. secret is the name of this Secret or of a chunk.
func headNameFrom(secret string) string { return secret[:min(len(secret), len(namePrefix)+hashLength)] }

// labels returns the labels of a Secret of a record.
func (s *Store) labels(part string) map[string]string {
	labels := map[string]string{labelRecord: part}
	if value := s.scope.label(); value != "" {
		labels[labelRecordScope] = value
	}
	if value := s.scope.hubLabel(); value != "" {
		labels[labelRecordHub] = value
	}
	return labels
}

// selector narrows a label selector to the records of the store's scope.
func (s *Store) selector(base string) string {
	if value := s.scope.label(); value != "" {
		return base + "," + labelRecordScope + "=" + value
	}
	return base + ",!" + labelRecordScope
}

// shortHash returns hashLength lower-case base32 characters: 100 bits.
func shortHash(raw []byte) string {
	sum := sha256.Sum256(raw)
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:hashLength])
}

// Load returns the record of id on the member. If there is none, Record.Exists of the result is false. If the error
// wraps ErrIncomplete, Load also returns a record, which has only the ID and the version; the caller may overwrite it.
func (s *Store) Load(ctx context.Context, id bundle.ID) (*Record, error) {
	secret, err := s.secrets.Get(ctx, s.headName(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		s.deleteCached(id)
		return &Record{Head: Head{ID: id}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec, err := s.readRecord(ctx, secret)
	if errors.Is(err, ErrIncomplete) {
		rec = incompleteRecord(id, versionOf(secret))
	}
	if rec != nil && !s.isCached(rec) {
		s.setCached(rec.withoutInline(), true)
	}
	return rec, err
}

// incompleteRecord returns a record that exists and has only the ID and the version.
func incompleteRecord(id bundle.ID, version string) *Record {
	return &Record{Head: Head{ID: id}, version: version, isIncomplete: true, mayHaveUnusedChunks: true}
}

// idOf returns the ID of the record with the head Secret secret; ok is false if it is not a record of this scope.
func (s *Store) idOf(secret metav1.Object) (id bundle.ID, ok bool) {
	text := secret.GetAnnotations()[kube.AnnotationRequestor]
	if len(text) > maxID {
		return bundle.ID{}, false
	}
	id, ok = ParseID(text)
	return id, ok && s.headName(id) == secret.GetName()
}

// decodeHead decodes the head in a Secret. memory is the estimated size of the decoded head in bytes.
func decodeHead(secret *corev1.Secret) (head Head, memory int64, err error) {
	raw := secret.Data[keyHead]
	if memory = kube.MemoryOf(raw, kube.TypeAny); memory > maxHeadMemory {
		return Head{}, 0, fmt.Errorf("the head needs more than %d MiB of memory", maxHeadMemory>>20)
	}
	err = json.Unmarshal(raw, &head)
	return head, memory, err
}

// readRecord reads a record whose head is in secret. It takes the entries from the cache if their version is the same.
func (s *Store) readRecord(ctx context.Context, secret *corev1.Secret) (*Record, error) {
	rec := &Record{version: versionOf(secret), mayHaveUnusedChunks: true, Entries: map[kube.Ref]Entry{}}
	var err error
	if rec.Head, rec.memory, err = decodeHead(secret); err != nil || s.headName(rec.ID) != secret.Name {
		return nil, fmt.Errorf("read %s: %w", secret.Name, ErrIncomplete)
	}
	rec.content = storedValue{inline: secret.Data[keyContent], chunks: rec.ContentChunks}
	rec.entryData = storedValue{inline: secret.Data[keyEntries], chunks: rec.EntryChunks}
	if known := s.Cached(rec.ID); known != nil && known.version == rec.version && !known.isIncomplete {
		rec.Entries, rec.mayHaveUnusedChunks, rec.memory = known.Entries, known.mayHaveUnusedChunks, known.memory
		return rec, nil
	}
	if err := s.readEntries(ctx, rec); err != nil {
		return nil, fmt.Errorf("read the inventory of %s: %w", rec.ID, err)
	}
	return rec, nil
}

// readEntries reads the entries of a record.
func (s *Store) readEntries(ctx context.Context, rec *Record) error {
	if rec.entryData.isEmpty() {
		return s.reserveMemory(ctx, rec)
	}
	packed, err := s.readValue(ctx, rec.entryData, maxEntries)
	if err != nil {
		return err
	}
	return s.entryCompressor.unpack(ctx, packed, s.memory, kube.TypeAny, func(raw []byte) error {
		entries, err := decodeEntries(raw)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrIncomplete, err)
		}
		for _, entry := range entries {
			rec.Entries[entry.Ref.Key()] = entry
		}
		rec.memory += int64(len(raw)) + memoryOfEntries(rec)
		return s.reserveMemory(ctx, rec)
	})
}

// Bundle returns the content of rec, which must be a result of Load or Save. The error wraps ErrIncomplete if it is
// missing.
func (s *Store) Bundle(ctx context.Context, rec *Record) (bundle.Bundle, error) {
	var b bundle.Bundle
	if rec.content.isEmpty() {
		return b, fmt.Errorf("read the content of %s: %w", rec.ID, ErrIncomplete)
	}
	packed, err := s.readValue(ctx, rec.content, maxContent)
	if err != nil {
		return b, fmt.Errorf("read the content of %s: %w", rec.ID, err)
	}
	if err := s.contentCompressor.unpack(ctx, packed, s.memory, kube.TypeUnstructured, decodeInto(&b)); err != nil {
		return b, fmt.Errorf("read the content of %s: %w", rec.ID, err)
	}
	return b, nil
}

// IsLost loads the record of id, and returns whether it does not exist, is incomplete, or lacks a chunk.
func (s *Store) IsLost(ctx context.Context, id bundle.ID) (bool, error) {
	rec, err := s.Load(ctx, id)
	if errors.Is(err, ErrIncomplete) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	if !rec.Exists() {
		return true, nil
	}
	complete, err := s.IsComplete(ctx, rec)
	return err == nil && !complete, err
}

// IsComplete returns whether rec has content and all its chunks exist. A record that does not exist counts as complete.
func (s *Store) IsComplete(ctx context.Context, rec *Record) (bool, error) {
	if rec.version != "" && rec.content.isEmpty() {
		return false, nil
	}
	if len(chunksOf(rec)) == 0 {
		return true, nil
	}
	existing, err := s.listChunks(ctx, rec.ID)
	if err != nil {
		return false, err
	}
	for _, name := range chunksOf(rec) {
		if !slices.Contains(existing, name) {
			return false, nil
		}
	}
	return true, nil
}

// Save replaces prior by next. prior must be the last result of Load or Save for the ID, or a copy of it. If content is
// nil, the content of prior stays. Save returns the stored record, which is a copy of next. It fails with a Conflict or
// AlreadyExists if another process has changed or created the record.
func (s *Store) Save(ctx context.Context, prior, next *Record, content *bundle.Bundle) (*Record, error) {
	saved := next.Edit()
	saved.content = prior.content
	if content == nil && prior.content.isOmitted {
		return nil, fmt.Errorf("write the record of %s: its content is not in memory", next.ID)
	}
	if content != nil {
		packed, err := s.contentCompressor.pack(content)
		if err != nil {
			return nil, fmt.Errorf("pack bundle %s: %w", next.ID, err)
		}
		if saved.content, err = s.storeValue(ctx, next.ID, packed, maxInlineContent); err != nil {
			return nil, err
		}
	}
	return s.write(ctx, prior, saved)
}

// write writes the entries and the head of saved in place of prior, and deletes the chunks that the head does not name.
func (s *Store) write(ctx context.Context, prior, saved *Record) (_ *Record, err error) {
	packed, err := s.entryCompressor.pack(saved.SortedEntries())
	if err != nil {
		return nil, fmt.Errorf("pack inventory of %s: %w", saved.ID, err)
	}
	if saved.entryData, err = s.storeValue(ctx, saved.ID, packed, maxInlineEntries); err != nil {
		return nil, err
	}
	saved.ContentChunks, saved.EntryChunks = saved.content.chunks, saved.entryData.chunks
	if saved.version, err = s.writeHead(ctx, saved, prior.version); err != nil {
		return nil, err
	}
	saved.isIncomplete, saved.mayHaveUnusedChunks, saved.memory = false, false, memoryOfEntries(saved)
	if prior.mayHaveUnusedChunks || !slices.Equal(chunksOf(prior), chunksOf(saved)) {
		if err := s.deleteUnusedChunks(ctx, saved); err != nil {
			return nil, err
		}
	}
	s.setCached(saved.withoutInline(), false)
	return saved, nil
}

// SecretNames lists the Secrets of rec: its chunks and its head.
func (s *Store) SecretNames(rec *Record) []string { return append(chunksOf(rec), s.headName(rec.ID)) }

// ListWatch lists and watches the metadata of the Secrets of all records, for an informer.
func (s *Store) ListWatch() *toolscache.ListWatch {
	return &toolscache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			opts.LabelSelector = s.selector(labelRecord)
			return s.metadata.List(ctx, opts)
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			opts.LabelSelector = s.selector(labelRecord)
			return s.metadata.Watch(ctx, opts)
		},
	}
}

// writeHead creates the head Secret if version is "", and otherwise updates it if it has this resourceVersion. It
// returns the new resourceVersion.
func (s *Store) writeHead(ctx context.Context, rec *Record, version string) (string, error) {
	raw, err := json.Marshal(rec.Head)
	if err != nil {
		return "", fmt.Errorf("encode the record of %s: %w", rec.ID, err)
	}
	annotations := map[string]string{kube.AnnotationRequestor: rec.ID.String()}
	s.scope.Annotate(annotations)
	labels := s.labels(partHead)
	if s.partitions != nil {
		labels[labelRecordPartition] = shortHash([]byte(s.partitions.Of(rec.ID)))
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name:            s.headName(rec.ID),
			Namespace:       s.namespace,
			ResourceVersion: version,
			Labels:          labels,
			Annotations:     annotations,
		},
		Data: map[string][]byte{keyHead: raw, keyContent: rec.content.inline, keyEntries: rec.entryData.inline},
	}
	var written *corev1.Secret
	if version == "" {
		written, err = s.createSecret(ctx, secret)
	} else {
		written, err = s.secrets.Update(ctx, secret, metav1.UpdateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return "", fmt.Errorf("write the record of %s: %w", rec.ID, err)
	}
	return versionOf(written), nil
}

// createSecret creates a Secret, and its namespace if that does not exist.
func (s *Store) createSecret(ctx context.Context, secret *corev1.Secret) (*corev1.Secret, error) {
	opts := metav1.CreateOptions{FieldManager: kube.FieldManager}
	created, err := s.secrets.Create(ctx, secret, opts)
	if !apierrors.IsNotFound(err) {
		return created, err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}
	if s.namespace != kube.AgentNamespace { // the manifest of the agent creates AgentNamespace without the label
		namespace.Labels = map[string]string{clusterv1alpha1.SystemLabel: "true"}
	}
	if _, err := s.namespaces.Create(ctx, namespace, opts); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create namespace %s: %w", s.namespace, err)
	}
	return s.secrets.Create(ctx, secret, opts)
}

// Delete deletes the record: its chunks first, so that no chunk remains without a head.
func (s *Store) Delete(ctx context.Context, rec *Record) error {
	if len(chunksOf(rec)) > 0 || rec.mayHaveUnusedChunks {
		bare := rec.Edit()
		bare.content, bare.entryData, bare.ContentChunks, bare.EntryChunks = storedValue{}, storedValue{}, nil, nil
		clear(bare.Entries)
		saved, err := s.write(ctx, rec, bare)
		if err != nil {
			return err
		}
		rec = saved
	}
	precondition := metav1.Preconditions{ResourceVersion: &rec.version}
	err := s.secrets.Delete(ctx, s.headName(rec.ID), metav1.DeleteOptions{Preconditions: &precondition})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the record of %s: %w", rec.ID, err)
	}
	s.deleteCached(rec.ID)
	return nil
}
