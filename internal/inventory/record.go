package inventory

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// Record is the inventory of one bundle. A bundle without an inventory has a zero Record with its ID. A Record that a
// Store has returned must not be changed: other goroutines read it. Edit returns a copy to change and save.
type Record struct {
	Head
	// Entries are the objects, by Ref.Key, which is the Ref without the version.
	Entries map[kube.Ref]Entry

	content   storedValue
	entryData storedValue // Entries as they are stored
	// version is the resourceVersion of the head Secret, "" if there is none.
	version string
	// memory is an estimate of the memory of Head and Entries in bytes. After a save it is too low, since it is
	// memoryOfEntries, until the record is decoded again.
	memory int64
	// isIncomplete is true for a record that exists but could not be read: it has only the ID and the version.
	isIncomplete bool
	// mayHaveUnusedChunks is true if there may be chunks that neither content nor entryData names.
	mayHaveUnusedChunks bool
}

// Head is the part of a record that is stored uncompressed.
type Head struct {
	ID          bundle.ID      `json:"id"`
	Owner       bundle.Owner   `json:"owner"`
	Options     bundle.Options `json:"options"`
	Digest      []byte         `json:"digest,omitempty"`
	State       bundle.State   `json:"state"`
	Message     string         `json:"message,omitempty"`
	LastApplied time.Time      `json:"lastApplied,omitzero"`
	// Hub is the UID of the hub that delivered the bundle, or "" if it is not known.
	Hub string `json:"hub,omitempty"`
	// Inputs is the digest of the inputs of the bundle, see bundle.Bundle.Inputs; "" if it is not known.
	Inputs string `json:"inputs,omitempty"`
	// Orphan is true if a withdrawal is in progress that keeps the objects.
	Orphan bool `json:"leave,omitempty"`
	// Suspended is true if drift is not corrected and nothing is retried until the engine's Converge is called again.
	Suspended bool `json:"suspended,omitempty"`
	// Releases are the states of the Helm releases of the bundle.
	Releases []ReleaseState `json:"releases,omitempty"`
	// ContentChunks and EntryChunks name the chunk Secrets. A Store sets them.
	ContentChunks []string `json:"contentChunks,omitempty"`
	EntryChunks   []string `json:"inventoryChunks,omitempty"`
}

// storedValue is a compressed value: in the head Secret, or in the chunks that the head names.
type storedValue struct {
	inline []byte
	chunks []string
	// isOmitted is true if the value is in the head Secret, but inline was dropped to save memory.
	isOmitted bool
}

func (s storedValue) isEmpty() bool { return !s.isOmitted && len(s.inline) == 0 && len(s.chunks) == 0 }

func (s storedValue) withoutInline() storedValue {
	return storedValue{chunks: s.chunks, isOmitted: s.isOmitted || len(s.inline) > 0}
}

// withoutInline returns a copy of r without the inline values.
func (r *Record) withoutInline() *Record {
	copied := *r
	copied.content, copied.entryData = r.content.withoutInline(), r.entryData.withoutInline()
	return &copied
}

// Edit returns a copy of r to change and save. Entries, Releases and their hooks are copied. Digest, the names of
// chunks and all options share memory with r: the caller may replace them, but not modify them.
func (r *Record) Edit() *Record {
	next := *r
	next.Entries = maps.Clone(r.Entries)
	if next.Entries == nil {
		next.Entries = map[kube.Ref]Entry{}
	}
	next.Releases = slices.Clone(r.Releases)
	for i := range next.Releases {
		next.Releases[i].Hooks = slices.Clone(next.Releases[i].Hooks)
		next.Releases[i].Abandoned = slices.Clone(next.Releases[i].Abandoned)
	}
	return &next
}

// Exists returns whether the record is on the member, complete or not.
func (r *Record) Exists() bool { return r.version != "" }

// HasContent returns whether the record names the content of its bundle.
func (r *Record) HasContent() bool { return !r.content.isEmpty() }

// WithoutContent returns a copy of r without content and digest, for a record with missing chunks. The caller passes
// the copy to Save as prior, with new content. Save then also deletes unused chunks.
func (r *Record) WithoutContent() *Record {
	next := r.Edit()
	next.Digest, next.content, next.mayHaveUnusedChunks = nil, storedValue{}, true
	return next
}

// BundleDigest returns the digest of the bundle that was delivered last.
func (r *Record) BundleDigest() bundle.Digest { return bundle.DigestFromBytes(r.Digest) }

// IsUpToDateWith returns whether the stored record r equals next, so that next need not be saved. It does not compare
// Owner and Options, since the digest covers them, nor LastApplied and Inputs, which are saved with the next change.
func (r *Record) IsUpToDateWith(next *Record) bool {
	return r.version != "" && r.BundleDigest() == next.BundleDigest() && r.State == next.State && r.Message == next.Message &&
		r.Hub == next.Hub && r.Orphan == next.Orphan && r.Suspended == next.Suspended && maps.Equal(r.Entries, next.Entries) &&
		reflect.DeepEqual(r.Releases, next.Releases)
}

// Covers returns whether the objects of next may be applied before next is saved. Then no object can exist without an
// entry if the process is killed, because the stored record r
//   - exists, is neither suspended nor in the state Removing, and
//   - has the digest and the release states of next, and
//   - has each entry of next, with the same Adopted, and with the same UID or none.
func (r *Record) Covers(next *Record) bool {
	if r.version == "" || r.BundleDigest() != next.BundleDigest() || r.State == bundle.StateRemoving || r.Suspended ||
		!reflect.DeepEqual(r.Releases, next.Releases) {
		return false
	}
	for key, entry := range next.Entries {
		// A new UID may be saved after the apply. A changed or removed UID must be saved before.
		if recorded, ok := r.Entries[key]; !ok || (recorded.UID != entry.UID && recorded.UID != "") || recorded.Adopted != entry.Adopted {
			return false
		}
	}
	return true
}

// NeedsWatch returns whether the objects of the record must be watched: to correct their drift, or to detect the end of
// their deletion.
func (r *Record) NeedsWatch() bool { return r.Options.CorrectDrift || r.State == bundle.StateRemoving }

// IsUnfinished returns whether the bundle must be run again. The last run has failed, or the state is Applying: the run
// was interrupted or waits for a Helm release.
func (r *Record) IsUnfinished() bool {
	return r.State == bundle.StateFailed || r.State == bundle.StateApplying
}

// AreReleasesDeployed returns whether all Helm releases are deployed.
func (r *Record) AreReleasesDeployed() bool {
	return !slices.ContainsFunc(r.Releases, func(s ReleaseState) bool { return s.Stage != StageDeployed })
}

// Report returns the report of the bundle. Changes is nil in it.
func (r *Record) Report() bundle.Report {
	return bundle.Report{
		ID: r.ID, Digest: r.BundleDigest(), State: r.State, Message: r.Message, Kinds: r.kinds(), LastApplied: r.LastApplied,
		Outdated: r.outdatedReleases(),
	}
}

// kinds returns the kinds of the existing objects, as "Kind.version.group".
func (r *Record) kinds() []string {
	set := map[string]bool{}
	for _, entry := range r.Entries {
		if entry.UID != "" {
			set[fmt.Sprintf("%s.%s.%s", entry.Ref.Kind, entry.Ref.Version, entry.Ref.Group)] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// SortedEntries returns the entries, sorted by kube.CompareRefs.
func (r *Record) SortedEntries() []Entry {
	return slices.SortedFunc(maps.Values(r.Entries), func(a, b Entry) int { return kube.CompareRefs(a.Ref, b.Ref) })
}
