package inventory_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
)

// owners has the process that serves each partition, which is the first part of the name in a bundle ID.
type owners map[string]string

func (o owners) of(process string) *inventory.Partitions {
	return &inventory.Partitions{
		Of: func(id bundle.ID) string {
			partition, _, _ := strings.Cut(id.RequestorName, "/")
			return partition
		},
		ListAssigned: func(context.Context) (all []string, err error) {
			for partition, owner := range o {
				if owner == process {
					all = append(all, partition)
				}
			}
			return all, nil
		},
		IsAssigned: func(_ context.Context, partition string) (bool, error) {
			owner, ok := o[partition]
			return owner == process || !ok && process == "default", nil
		},
	}
}

func (m *member) storeOf(o owners, process string) *inventory.Store {
	return inventory.NewPartitionedStore(m.core, m.objects, m.namespace, inventory.LocalScope(), o.of(process))
}

func in(partition string) bundle.ID {
	return bundle.ID{RequestorKind: "ClusterSummary", RequestorName: partition + "/web", Feature: "Resources"}
}

// serve begins to serve a partition, and saves its record.
func (m *member) serve(s *inventory.Store, partition string) *inventory.Record {
	m.t.Helper()
	if _, err := s.Serve(m.t.Context(), partition); err != nil {
		m.t.Fatal(err)
	}
	rec, err := s.Load(m.t.Context(), in(partition))
	if err != nil {
		m.t.Fatal(err)
	}
	return m.save(s, rec, rec.Edit(), content(m.t, 100))
}

func cachedIDs(s *inventory.Store) map[bundle.ID]bool {
	all := map[bundle.ID]bool{}
	for _, rec := range s.ListCached() {
		all[rec.ID] = true
	}
	return all
}

func TestListReadsOnlyThePartitionsThatAreServed(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	all := m.storeOf(owners{}, "default")
	for _, partition := range []string{"one", "two", "lost"} {
		m.serve(all, partition)
	}
	s := m.storeOf(owners{"one": "default", "two": "k", "empty": "default"}, "default")
	if err := s.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(cachedIDs(s), map[bundle.ID]bool{in("one"): true, in("lost"): true}); diff != "" {
		t.Errorf("cached (-got +want):\n%s", diff)
	}
	// The partition lost was not known before the list, which can be incomplete about it.
	for partition, want := range map[string]bool{"one": true, "empty": true, "two": false, "lost": false} {
		if got := s.IsPartitionListed(in(partition)); got != want {
			t.Errorf("IsPartitionListed of %s: got %t", partition, got)
		}
	}
	if records, err := s.ListPartition(t.Context(), "lost"); err != nil || len(records) != 1 || !s.IsPartitionListed(in("lost")) {
		t.Errorf("ListPartition: got %v, %v", records, err)
	}
	if _, err := s.ListPartition(t.Context(), "two"); !errors.Is(err, inventory.ErrNotServed) {
		t.Errorf("ListPartition of another process: got %v", err)
	}
	if _, err := s.Serve(t.Context(), "two"); !errors.Is(err, inventory.ErrNotServed) {
		t.Errorf("Serve of another process: got %v", err)
	}
}

func TestPartitionMovesAndComesBack(t *testing.T) {
	t.Parallel()
	m := newMember(t)
	o := owners{"one": "a", "two": "a"}
	a, b := m.storeOf(o, "a"), m.storeOf(o, "b")
	if err := errors.Join(a.List(t.Context()), b.List(t.Context())); err != nil {
		t.Fatal(err)
	}
	stale := m.serve(a, "one")
	m.serve(a, "two")
	ended := a.ServingEnded(in("one"))

	o["one"] = "b"
	a.StopServing("one")
	select {
	case <-ended:
	default:
		t.Error("the partition is not ended")
	}
	if diff := cmp.Diff(cachedIDs(a), map[bundle.ID]bool{in("two"): true}); diff != "" {
		t.Errorf("cached after the release (-got +want):\n%s", diff)
	}
	stale = m.save(a, stale, stale.Edit(), nil) // a run that has not ended yet
	if a.Cached(in("one")) != nil {
		t.Error("a record is cached after the release")
	}

	if _, err := b.Serve(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if b.IsPartitionListed(in("one")) {
		t.Error("a partition that has moved here counts as listed")
	}
	if records, err := b.ListPartition(t.Context(), "one"); err != nil || len(records) != 1 {
		t.Errorf("ListPartition: got %v, %v", records, err)
	}
	if changes := b.TakeChanges(); len(changes) != 1 || !changes[0].MayHaveDrifted {
		t.Errorf("changes: got %v", changes)
	}
	rec := m.serve(b, "one")
	if _, err := a.Save(t.Context(), stale, stale.Edit(), nil); !apierrors.IsConflict(err) {
		t.Errorf("save by the former process: got %v, want a conflict", err)
	}

	if err := b.Delete(t.Context(), rec); err != nil {
		t.Fatal(err)
	}
	o["one"] = "a"
	b.StopServing("one")
	if _, err := a.Serve(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	if records, err := a.ListPartition(t.Context(), "one"); err != nil || len(records) != 0 {
		t.Errorf("ListPartition after the return: got %v, %v", records, err)
	}
}

// TestListReadsAllPages lists more records than fit into one page.
func TestListReadsAllPages(t *testing.T) {
	t.Parallel()
	const records = 501
	m := newMember(t)
	s := m.store(inventory.OwnerScope{})
	var work errgroup.Group
	work.SetLimit(16)
	for i := range records {
		work.Go(func() error {
			none := &inventory.Record{Head: inventory.Head{ID: in(fmt.Sprint(i))}}
			_, err := s.Save(t.Context(), none, none.Edit(), &bundle.Bundle{ID: none.ID})
			return err
		})
	}
	if err := work.Wait(); err != nil {
		t.Fatal(err)
	}
	next := m.store(inventory.OwnerScope{})
	if err := next.List(t.Context()); err != nil || len(next.ListCached()) != records {
		t.Errorf("got %d records, %v; want %d", len(next.ListCached()), err, records)
	}
}
