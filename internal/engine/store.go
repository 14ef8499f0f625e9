package engine

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/metadata"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// labelRecord is on every Secret of a record; its values are "head" and "chunk".
	labelRecord = "towline.dev/record"
	// labelRecordOf names the head that a chunk belongs to.
	labelRecordOf = "towline.dev/record-of"

	// labelRecordScope tells records of different scopes and hubs apart, and labelRecordHub those of different hubs; records of the zero
	// domain have neither.
	labelRecordScope = "towline.dev/record-scope"
	labelRecordHub   = "towline.dev/record-hub"

	keyHead      = "head"
	keyContent   = "content"
	keyInventory = "inventory"
	keyChunk     = "chunk"

	// A Secret holds at most 1 MiB. Content and inventory up to these sizes (in bytes, compressed) share the head Secret, so that a
	// small bundle costs one write.
	maxInlineContent   = 256 << 10
	maxInlineInventory = 384 << 10
	chunkSize          = 900 << 10
)

// errIncomplete says that a part of a record is missing: somebody deleted or changed its Secrets.
var errIncomplete = errors.New("the record is incomplete")

// store keeps the records in Secrets of one namespace. At most one caller per ID saves or deletes at a time.
type store struct {
	domain     domain
	namespace  string
	secrets    corev1client.SecretInterface
	metadata   metadata.ResourceInterface // of the same Secrets
	namespaces corev1client.NamespaceInterface
	// changed is called after each change of what is cached.
	changed func()

	// mu guards what follows.
	mu sync.Mutex
	// cache holds the records as they were last read or written; listed says that it has all of them.
	cache  map[bundle.ID]*record
	listed bool
}

// nameOf returns the name of the head Secret of id.
func (s *store) nameOf(id bundle.ID) string {
	return "towline-record-" + shortHash([]byte(s.domain.sign(id)))
}

// labels returns the labels of a Secret of a record.
func (s *store) labels(part string) map[string]string {
	labels := map[string]string{labelRecord: part}
	if key := s.domain.key(); key != "" {
		labels[labelRecordScope] = key
	}
	if key := s.domain.hubKey(); key != "" {
		labels[labelRecordHub] = key
	}
	return labels
}

// selector narrows a label selector to the records of the store's domain.
func (s *store) selector(what string) string {
	if key := s.domain.key(); key != "" {
		return what + "," + labelRecordScope + "=" + key
	}
	return what + ",!" + labelRecordScope
}

// shortHash returns 20 lower-case base32 characters: 100 bits.
func shortHash(raw []byte) string {
	sum := sha256.Sum256(raw)
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:20])
}

// load returns the record of id as it is on the member: an empty one without version if there is none. With errIncomplete the record
// is empty too, but can be saved over what is left.
func (s *store) load(ctx context.Context, id bundle.ID) (*record, error) {
	secret, err := s.secrets.Get(ctx, s.nameOf(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		s.drop(id)
		return &record{head: head{ID: id}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec, err := s.decode(ctx, secret)
	if errors.Is(err, errIncomplete) {
		s.drop(id)
		return &record{head: head{ID: id}, version: secret.ResourceVersion, cold: true}, err
	}
	return rec, err
}

// all returns every record on the member, sorted by ID. Incomplete ones are left out.
func (s *store) all(ctx context.Context) ([]*record, error) {
	list, err := s.secrets.List(ctx, metav1.ListOptions{LabelSelector: s.selector(labelRecord + "=" + keyHead)})
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var records []*record
	for i := range list.Items {
		rec, err := s.decode(ctx, &list.Items[i])
		if errors.Is(err, errIncomplete) {
			continue
		}
		if err != nil {
			return nil, err
		}
		records = append(records, rec)
	}
	s.mu.Lock()
	s.listed = true
	s.mu.Unlock()
	slices.SortFunc(records, func(a, b *record) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return records, nil
}

func (s *store) decode(ctx context.Context, secret *corev1.Secret) (*record, error) {
	rec := &record{version: secret.ResourceVersion, cold: true, inventory: map[kube.Ref]held{}}
	if err := json.Unmarshal(secret.Data[keyHead], &rec.head); err != nil || s.nameOf(rec.ID) != secret.Name {
		return nil, fmt.Errorf("read %s: %w", secret.Name, errIncomplete)
	}
	if known := s.cached(rec.ID); known != nil && known.version == rec.version {
		return known, nil
	}
	rec.content = stored{inline: secret.Data[keyContent], chunks: rec.ContentChunks}
	rec.rest = stored{inline: secret.Data[keyInventory], chunks: rec.InventoryChunks}
	var items []held
	if !rec.rest.empty() {
		if err := s.unpack(ctx, rec.rest, &items); err != nil {
			return nil, fmt.Errorf("read the inventory of %s: %w", rec.ID, err)
		}
	}
	for _, item := range items {
		rec.inventory[item.Ref.Key()] = item
	}
	s.put(rec)
	return rec, nil
}

// bundle returns the content of rec.
func (s *store) bundle(ctx context.Context, rec *record) (bundle.Bundle, error) {
	var b bundle.Bundle
	if rec.content.empty() {
		return b, fmt.Errorf("read the content of %s: %w", rec.ID, errIncomplete)
	}
	if err := s.unpack(ctx, rec.content, &b); err != nil {
		return b, fmt.Errorf("read the content of %s: %w", rec.ID, err)
	}
	return b, nil
}

// lost says whether the record of id is no longer all there.
func (s *store) lost(ctx context.Context, id bundle.ID) (bool, error) {
	rec, err := s.load(ctx, id)
	if errors.Is(err, errIncomplete) {
		return true, nil
	}
	if err != nil || rec.version == "" {
		return err == nil, err
	}
	intact, err := s.intact(ctx, rec)
	return err == nil && !intact, err
}

// intact says whether the content of rec and all parts that have Secrets of their own are there.
func (s *store) intact(ctx context.Context, rec *record) (bool, error) {
	if rec.version != "" && rec.content.empty() {
		return false, nil
	}
	if len(chunksOf(rec)) == 0 {
		return true, nil
	}
	there, err := s.parts(ctx, rec.ID)
	if err != nil {
		return false, err
	}
	for _, name := range chunksOf(rec) {
		if !slices.Contains(there, name) {
			return false, nil
		}
	}
	return true, nil
}

// parts lists the chunks of id that exist, by metadata alone.
func (s *store) parts(ctx context.Context, id bundle.ID) ([]string, error) {
	list, err := s.metadata.List(ctx, metav1.ListOptions{LabelSelector: labelRecordOf + "=" + s.nameOf(id)})
	if err != nil {
		return nil, fmt.Errorf("list parts of the record of %s: %w", id, err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names, nil
}

func (s *store) unpack(ctx context.Context, from stored, into any) error {
	packed := slices.Clone(from.inline)
	for _, name := range from.chunks {
		secret, err := s.secrets.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return fmt.Errorf("%w: Secret %s is missing", errIncomplete, name)
		}
		if err != nil {
			return err
		}
		packed = append(packed, secret.Data[keyChunk]...)
	}
	if err := unpack(packed, into); err != nil {
		return fmt.Errorf("%w: %w", errIncomplete, err)
	}
	return nil
}

// save writes next in place of prior: new chunks first, then the head in one write, then the chunks that nothing names any more go.
// If content is not nil it replaces what next holds. It returns the record as it is stored now.
func (s *store) save(ctx context.Context, prior, next *record, content *bundle.Bundle) (*record, error) {
	saved := next.edit() // the caller goes on changing next
	if content != nil {
		packed, err := pack(content)
		if err != nil {
			return nil, fmt.Errorf("pack bundle %s: %w", next.ID, err)
		}
		if saved.content, err = s.stow(ctx, next.ID, packed, maxInlineContent); err != nil {
			return nil, err
		}
	}
	packed, err := pack(saved.listed())
	if err != nil {
		return nil, fmt.Errorf("pack inventory of %s: %w", next.ID, err)
	}
	if saved.rest, err = s.stow(ctx, next.ID, packed, maxInlineInventory); err != nil {
		return nil, err
	}
	saved.ContentChunks, saved.InventoryChunks = saved.content.chunks, saved.rest.chunks
	if saved.version, err = s.flip(ctx, saved, prior.version); err != nil {
		return nil, err
	}
	saved.cold = false
	if prior.cold || !slices.Equal(chunksOf(prior), chunksOf(saved)) {
		if err := s.sweep(ctx, saved); err != nil {
			return nil, err
		}
	}
	s.put(saved)
	return saved, nil
}

func chunksOf(r *record) []string { return slices.Concat(r.content.chunks, r.rest.chunks) }

// stow keeps a small value for the head and writes a big one in chunks, which are named by their content.
func (s *store) stow(ctx context.Context, id bundle.ID, packed []byte, limit int) (stored, error) {
	if len(packed) <= limit {
		return stored{inline: packed}, nil
	}
	var out stored
	immutable := true
	for chunk := range slices.Chunk(packed, chunkSize) {
		labels := s.labels(keyChunk)
		labels[labelRecordOf] = s.nameOf(id)
		secret := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Name:   s.nameOf(id) + "-" + shortHash(chunk),
				Labels: labels,
			},
			Immutable: &immutable,
			Data:      map[string][]byte{keyChunk: chunk},
		}
		if _, err := s.create(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
			return stored{}, fmt.Errorf("write a part of the record of %s: %w", id, err)
		}
		out.chunks = append(out.chunks, secret.Name)
	}
	return out, nil
}

// flip writes the head Secret over the one of the given version and returns the new version.
func (s *store) flip(ctx context.Context, rec *record, version string) (string, error) {
	raw, err := json.Marshal(rec.head)
	if err != nil {
		return "", fmt.Errorf("encode the record of %s: %w", rec.ID, err)
	}
	annotations := map[string]string{kube.AnnotationRequestor: rec.ID.String()}
	s.domain.mark(annotations)
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{
			Name:            s.nameOf(rec.ID),
			Namespace:       s.namespace,
			ResourceVersion: version,
			Labels:          s.labels(keyHead),
			Annotations:     annotations,
		},
		Data: map[string][]byte{keyHead: raw, keyContent: rec.content.inline, keyInventory: rec.rest.inline},
	}
	var written *corev1.Secret
	if version == "" {
		written, err = s.create(ctx, secret)
	} else {
		written, err = s.secrets.Update(ctx, secret, metav1.UpdateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return "", fmt.Errorf("write the record of %s: %w", rec.ID, err)
	}
	return written.ResourceVersion, nil
}

// create creates a Secret, and the namespace before it if need be.
func (s *store) create(ctx context.Context, secret *corev1.Secret) (*corev1.Secret, error) {
	opts := metav1.CreateOptions{FieldManager: kube.FieldManager}
	created, err := s.secrets.Create(ctx, secret, opts)
	if !apierrors.IsNotFound(err) {
		return created, err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.namespace}}
	if s.namespace != kube.AgentNamespace {
		namespace.Labels = map[string]string{clusterv1alpha1.SystemLabel: "true"}
	}
	if _, err := s.namespaces.Create(ctx, namespace, opts); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create namespace %s: %w", s.namespace, err)
	}
	return s.secrets.Create(ctx, secret, opts)
}

// sweep deletes the chunks that rec does not name: of earlier content, or of a save that was cut off.
func (s *store) sweep(ctx context.Context, rec *record) error {
	there, err := s.parts(ctx, rec.ID)
	if err != nil {
		return err
	}
	named := chunksOf(rec)
	for _, name := range there {
		if slices.Contains(named, name) {
			continue
		}
		if err := s.secrets.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete an old part of the record of %s: %w", rec.ID, err)
		}
	}
	return nil
}

// delete removes the record: its chunks first, so that none outlives it.
func (s *store) delete(ctx context.Context, rec *record) error {
	if len(chunksOf(rec)) > 0 || rec.cold {
		bare := rec.edit()
		bare.content, bare.rest, bare.ContentChunks, bare.InventoryChunks = stored{}, stored{}, nil, nil
		clear(bare.inventory)
		saved, err := s.save(ctx, rec, bare, nil)
		if err != nil {
			return err
		}
		rec = saved
	}
	precondition := metav1.Preconditions{ResourceVersion: &rec.version}
	err := s.secrets.Delete(ctx, s.nameOf(rec.ID), metav1.DeleteOptions{Preconditions: &precondition})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the record of %s: %w", rec.ID, err)
	}
	s.drop(rec.ID)
	return nil
}

// known returns the records as they were last read or written, in no order.
func (s *store) known() []*record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.cache))
}

func (s *store) cached(id bundle.ID) *record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cache[id]
}

func (s *store) put(rec *record) {
	s.mu.Lock()
	s.cache[rec.ID] = rec
	s.mu.Unlock()
	s.changed()
}

func (s *store) drop(id bundle.ID) {
	s.mu.Lock()
	_, had := s.cache[id]
	delete(s.cache, id)
	s.mu.Unlock()
	if had {
		s.changed()
	}
}

// uidOf is for a precondition.
func uidOf(uid types.UID) *metav1.Preconditions { return &metav1.Preconditions{UID: &uid} }
