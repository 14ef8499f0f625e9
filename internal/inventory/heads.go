package inventory

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
)

// ListHeads returns the heads of the records on the member as they are now, sorted by ID. A record that another process
// has changed, or that is incomplete, has no Entries and no content: do not pass the results to Bundle or Save. It
// costs one list of metadata, and one read of each such record.
func (s *Store) ListHeads(ctx context.Context) ([]*Record, error) {
	list, err := s.metadata.List(ctx, metav1.ListOptions{LabelSelector: s.selector(labelRecord + "=" + partHead)})
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var all []*Record
	for i := range list.Items {
		id, ok := s.idOf(&list.Items[i])
		if !ok {
			continue
		}
		rec := s.Cached(id)
		if rec == nil || rec.isIncomplete || rec.version != list.Items[i].ResourceVersion {
			if rec, err = s.loadHead(ctx, id); err != nil {
				return nil, err
			}
		}
		if rec.Exists() {
			all = append(all, rec)
		}
	}
	slices.SortFunc(all, compareIDs)
	return all, nil
}

func compareIDs(a, b *Record) int { return strings.Compare(a.ID.String(), b.ID.String()) }

// loadHead reads the head of a record. It does not check that the chunks exist.
func (s *Store) loadHead(ctx context.Context, id bundle.ID) (*Record, error) {
	rec := &Record{Head: Head{ID: id}, mayHaveUnusedChunks: true}
	secret, err := s.secrets.Get(ctx, s.nameOf(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return rec, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec.version = secret.ResourceVersion
	if err := json.Unmarshal(secret.Data[keyHead], &rec.Head); err != nil {
		// Keep the ID: a withdrawal finds the objects by their ownership labels.
		rec.Head = Head{ID: id}
	}
	return rec, nil
}

// parseID is the reverse of bundle.ID.String.
func parseID(text string) (bundle.ID, bool) {
	kind, rest, _ := strings.Cut(text, "/")
	last := strings.LastIndex(rest, "/")
	if last < 0 {
		return bundle.ID{}, false
	}
	return bundle.ID{RequestorKind: kind, RequestorName: rest[:last], Feature: rest[last+1:]}, true
}
