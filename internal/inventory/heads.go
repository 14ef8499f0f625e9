package inventory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
)

// ListHeads returns the records on the member as they are now, sorted by ID. It lists their metadata. For a record that
// is not cached in this version it reads the head, and returns a record with only the fields of the head. Do not pass
// the results to Bundle or Save.
func (s *Store) ListHeads(ctx context.Context) ([]*Record, error) {
	opts := metav1.ListOptions{LabelSelector: s.selector(labelRecord + "=" + partHead), Limit: metadataPageSize}
	var all []*Record
	memory := s.memory.ForSameNamespace()
	defer memory.Close()
	var needed int64
	for listed := 0; ; {
		page, err := s.metadata.List(ctx, opts)
		if err != nil {
			return nil, fmt.Errorf("list records: %w", err)
		}
		listed += max(1, len(page.Items)) // an empty page counts, so that endless empty pages end
		if err := s.checkNumber(listed); err != nil {
			return nil, err
		}
		for i := range page.Items {
			rec, err := s.readHead(ctx, &page.Items[i])
			if err != nil {
				return nil, err
			}
			if !rec.Exists() {
				continue
			}
			all = append(all, rec)
			if rec != s.Cached(rec.ID) { // the memory of cached records is reserved
				needed += rec.memory
			}
			if err := memory.Resize(ctx, needed); err != nil {
				return nil, fmt.Errorf("list records: %w", err)
			}
		}
		if opts.Continue = page.Continue; opts.Continue == "" {
			slices.SortFunc(all, compareIDs)
			return all, nil
		}
	}
}

// readHead returns the cached record of a head Secret, or a record with only its head if the Secret has changed since.
// Exists of the result is false if the Secret has no record of this scope.
func (s *Store) readHead(ctx context.Context, secret *metav1.PartialObjectMetadata) (*Record, error) {
	id, ok := s.idOf(secret)
	if !ok {
		return &Record{}, nil
	}
	if rec := s.Cached(id); rec != nil && !rec.isIncomplete && rec.version == versionOf(secret) {
		return rec, nil
	}
	return s.loadHead(ctx, id)
}

// List reads all records on the member into the cache, page by page. It caches an incomplete record with only its ID
// and version. With Partitions, it first serves the partitions that Partitions.ListAssigned returns. For a record of
// another partition it calls Partitions.IsAssigned, and serves this partition too if the result is true. It skips the
// records of all others.
func (s *Store) List(ctx context.Context) error {
	unlock, err := s.lockListing(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	known, err := s.servePartitions(ctx)
	if err != nil {
		return err
	}
	if err := s.readPages(ctx, labelRecord+"="+partHead, s.serveAssigned()); err != nil {
		return err
	}
	s.setPartitionsListed(known)
	s.cache.mu.Lock()
	s.cache.isListed = true
	s.cache.mu.Unlock()
	return nil
}

// lockListing waits until no other caller lists records.
func (s *Store) lockListing(ctx context.Context) (unlock func(), err error) {
	select {
	case s.listing <- struct{}{}:
		s.cache.setListing(true)
		return func() {
			s.cache.setListing(false)
			<-s.listing
		}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// readPages reads the records whose heads a label selector selects, and for which isWanted returns true.
func (s *Store) readPages(ctx context.Context, selector string, isWanted func(context.Context, bundle.ID) (bool, error)) error {
	opts := metav1.ListOptions{LabelSelector: s.selector(selector), Limit: pageSize}
	for listed := 0; ; {
		page, err := s.secrets.List(ctx, opts)
		if err != nil {
			return fmt.Errorf("list records: %w", err)
		}
		listed += max(1, len(page.Items)) // an empty page counts, so that endless empty pages end
		if err := s.checkNumber(listed); err != nil {
			return err
		}
		for i := range page.Items {
			if err := s.readListed(ctx, &page.Items[i], isWanted); err != nil {
				return err
			}
		}
		if page.Continue == "" {
			return nil
		}
		opts.Continue = page.Continue
	}
}

// readListed reads the record with a head Secret into the cache. If the annotation with the ID is missing, the ID in
// the head counts.
func (s *Store) readListed(ctx context.Context, secret *corev1.Secret, isWanted func(context.Context, bundle.ID) (bool, error)) error {
	id, ok := s.idOf(secret)
	if ok {
		if wanted, err := isWanted(ctx, id); err != nil || !wanted {
			return err
		}
	}
	rec, err := s.readRecord(ctx, secret)
	switch {
	case err == nil:
		s.addListed(rec.withoutInline())
	case !errors.Is(err, ErrIncomplete):
		return err
	case ok:
		s.addListed(incompleteRecord(id, versionOf(secret)))
	}
	return nil
}

func compareIDs(a, b *Record) int { return strings.Compare(a.ID.String(), b.ID.String()) }

// loadHead reads the head of a record. It does not check that the chunks exist. If the head cannot be decoded, the
// record has only the ID and the version. isIncomplete is never set: it matters only for cached records, and the result
// is not cached.
func (s *Store) loadHead(ctx context.Context, id bundle.ID) (*Record, error) {
	rec := &Record{Head: Head{ID: id}, mayHaveUnusedChunks: true}
	secret, err := s.secrets.Get(ctx, s.headName(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return rec, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec.version = versionOf(secret)
	if rec.Head, rec.memory, err = decodeHead(secret); err != nil || rec.ID != id {
		// A withdrawal finds the objects by the ID in their ownership labels.
		rec.Head = Head{ID: id}
	}
	return rec, nil
}

// ParseID is the reverse of bundle.ID.String.
func ParseID(text string) (bundle.ID, bool) {
	kind, rest, _ := strings.Cut(text, "/")
	last := strings.LastIndex(rest, "/")
	if last < 0 {
		return bundle.ID{}, false
	}
	return bundle.ID{RequestorKind: kind, RequestorName: rest[:last], Feature: rest[last+1:]}, true
}
