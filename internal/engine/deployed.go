package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// deployed describes the bundle of a record.
func (e *Engine) deployed(rec *record) bundle.Deployed {
	return bundle.Deployed{
		ID: rec.ID, Owner: rec.Owner, Hub: cmp.Or(rec.Hub, e.domain.hub), Removing: rec.State == bundle.StateRemoving, Leave: rec.Leave,
		CorrectDrift: rec.Options.Heal, Report: rec.report(), Releases: rec.deployedReleases(),
	}
}

// FindDeployed returns the Deployed of the record of id; ok is false if there is none. It makes no request once Run has read the records.
func (e *Engine) FindDeployed(ctx context.Context, id bundle.ID) (d bundle.Deployed, ok bool, err error) {
	if rec := e.store.cached(id); rec != nil {
		return e.deployed(rec), true, nil
	}
	if e.store.isListed() {
		return bundle.Deployed{}, false, nil
	}
	// With errIncomplete the record is empty but for its version; no version means that there is none.
	rec, err := e.store.load(ctx, id)
	if err != nil && !errors.Is(err, errIncomplete) {
		return bundle.Deployed{}, false, err
	}
	return e.deployed(rec), rec.version != "", nil
}

// KnownDeployed lists the cached records, sorted by ID, without a request; ok is false before Run has listed them.
func (e *Engine) KnownDeployed() (all []bundle.Deployed, ok bool) {
	if !e.store.isListed() {
		return nil, false
	}
	for _, rec := range e.store.known() {
		all = append(all, e.deployed(rec))
	}
	slices.SortFunc(all, func(a, b bundle.Deployed) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all, true
}

// ListDeployed lists what the records on the cluster say now, sorted by ID. It costs one list of metadata, and one read of each record that
// another process has changed.
func (e *Engine) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	list, err := e.store.metadata.List(ctx, metav1.ListOptions{LabelSelector: e.store.selector(labelRecord + "=" + keyHead)})
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var all []bundle.Deployed
	for i := range list.Items {
		id, ok := parseID(list.Items[i].Annotations[kube.AnnotationRequestor])
		if !ok || e.store.nameOf(id) != list.Items[i].Name {
			continue // not a record of this engine: the name does not match the ID
		}
		rec := e.store.cached(id)
		if rec == nil || rec.version != list.Items[i].ResourceVersion {
			if rec, err = e.store.loadHead(ctx, id); err != nil {
				return nil, err
			}
		}
		if rec.version != "" {
			all = append(all, e.deployed(rec))
		}
	}
	slices.SortFunc(all, func(a, b bundle.Deployed) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all, nil
}

// loadHead reads a record without its inventory, of which parts may be missing.
func (s *store) loadHead(ctx context.Context, id bundle.ID) (*record, error) {
	rec := &record{head: head{ID: id}}
	secret, err := s.secrets.Get(ctx, s.nameOf(id), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return rec, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the record of %s: %w", id, err)
	}
	rec.version = secret.ResourceVersion
	if err := json.Unmarshal(secret.Data[keyHead], &rec.head); err != nil {
		// Keep the ID: a withdrawal finds the objects by their ownership labels.
		rec.head = head{ID: id}
	}
	return rec, nil
}

// parseID reads what bundle.ID.String printed.
func parseID(text string) (bundle.ID, bool) {
	kind, rest, _ := strings.Cut(text, "/")
	last := strings.LastIndex(rest, "/")
	if last < 0 {
		return bundle.ID{}, false
	}
	return bundle.ID{RequestorKind: kind, RequestorName: rest[:last], Feature: rest[last+1:]}, true
}

// isListed says whether all records have been read once.
func (s *store) isListed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listed
}
