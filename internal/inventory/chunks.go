package inventory

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
)

// chunksOf lists the chunks that the head of a record names.
func chunksOf(r *Record) []string { return slices.Concat(r.content.chunks, r.entryData.chunks) }

// storeValue returns the stored form of a value. A value of at most maxInline bytes is inline: the caller writes it to
// the head Secret. A larger value is written to chunks, which are named by their content.
func (s *Store) storeValue(ctx context.Context, id bundle.ID, packed []byte, maxInline int) (storedValue, error) {
	if len(packed) <= maxInline {
		return storedValue{inline: packed}, nil
	}
	var out storedValue
	immutable := true
	for chunk := range slices.Chunk(packed, chunkSize) {
		labels := s.labels(partChunk)
		labels[labelRecordOf] = s.headName(id)
		secret := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Name:   s.headName(id) + "-" + shortHash(chunk),
				Labels: labels,
			},
			Immutable: &immutable,
			Data:      map[string][]byte{keyChunk: chunk},
		}
		if _, err := s.createSecret(ctx, secret); err != nil && !apierrors.IsAlreadyExists(err) {
			return storedValue{}, fmt.Errorf("write a part of the record of %s: %w", id, err)
		}
		out.chunks = append(out.chunks, secret.Name)
	}
	return out, nil
}

// readValue is the reverse of storeValue. maxSize limits the value, in bytes.
func (s *Store) readValue(ctx context.Context, from storedValue, maxSize int) ([]byte, error) {
	if len(from.chunks) > maxSize/chunkSize+1 {
		return nil, fmt.Errorf("%w: it names %d chunks", ErrIncomplete, len(from.chunks))
	}
	packed := slices.Clone(from.inline)
	for _, name := range from.chunks {
		secret, err := s.secrets.Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, fmt.Errorf("%w: Secret %s is missing", ErrIncomplete, name)
		}
		if err != nil {
			return nil, err
		}
		if len(secret.Data[keyChunk]) > chunkSize {
			return nil, fmt.Errorf("%w: Secret %s is too long", ErrIncomplete, name)
		}
		packed = append(packed, secret.Data[keyChunk]...)
	}
	return packed, nil
}

// listChunks lists the chunks of id that exist, by metadata alone.
func (s *Store) listChunks(ctx context.Context, id bundle.ID) ([]string, error) {
	list, err := s.metadata.List(ctx, metav1.ListOptions{LabelSelector: labelRecordOf + "=" + s.headName(id)})
	if err != nil {
		return nil, fmt.Errorf("list parts of the record of %s: %w", id, err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return names, nil
}

// deleteUnusedChunks deletes the chunks that rec does not name: of earlier content, or of an interrupted save.
func (s *Store) deleteUnusedChunks(ctx context.Context, rec *Record) error {
	existing, err := s.listChunks(ctx, rec.ID)
	if err != nil {
		return err
	}
	named := chunksOf(rec)
	for _, name := range existing {
		if slices.Contains(named, name) {
			continue
		}
		if err := s.secrets.Delete(ctx, name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete an old part of the record of %s: %w", rec.ID, err)
		}
	}
	return nil
}
