package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	"github.com/klauspost/compress/zstd"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// held is what a record holds of one object.
type held struct {
	Ref kube.Ref `json:"ref"`
	// UID is empty while the object was only planned: it may exist or not.
	UID types.UID `json:"uid,omitempty"`
	// Fields is the fingerprint of the fields that we set and nobody else has changed, as it was after our last apply.
	Fields string `json:"fields,omitempty"`
	// Adopted says that the object existed before we applied it: it is never deleted. Without a UID, it is planned to
	// be adopted. Records of earlier versions do not have it; then the annotation of the object tells.
	Adopted bool `json:"adopted,omitempty"`
	// Kept says that the bundle lacks the object and that it is not pruned all the same: see bundle.Bundle.KeepObjects.
	Kept bool `json:"kept,omitempty"`
	// Origin is the Helm release or the referenced object of the hub that the object came from; "" if it was neither, or is not known.
	Origin string `json:"origin,omitempty"`
	// Claim is the version of the object that a pass was about to take over from a rival, "" if there was none.
	Claim string `json:"claimed,omitempty"`
	// FromHelm says that Helm itself deployed the object, in a revision before that of the bundle.
	FromHelm bool `json:"fromHelm,omitempty"`
	// isRecord says that the object is a release record, which is not part of the inventory.
	isRecord bool
	// Rival is the requestor that has the object now, for the same profile. It has no UID then.
	Rival string `json:"rival,omitempty"`
}

// recordsAdoption says whether the record holds this very object as one that existed before us. Only an object that is
// marked for the bundle can be meant while the record has no UID.
func (h held) recordsAdoption(seen *live) bool {
	return h.Adopted && (h.UID == "" || h.UID == seen.uid)
}

// record is what the member remembers of one bundle. A record that was loaded or saved is never changed; see edit.
type record struct {
	head
	inventory map[kube.Ref]held // by Ref.Key
	content   stored
	rest      stored // the inventory as it is stored
	// version is the resourceVersion of the head Secret, "" if there is none.
	version string
	// cold says that another process may have left chunks behind.
	cold bool
}

// head is the part of a record that is stored as it is.
type head struct {
	ID          bundle.ID      `json:"id"`
	Owner       bundle.Owner   `json:"owner"`
	Options     bundle.Options `json:"options"`
	Digest      []byte         `json:"digest,omitempty"`
	State       bundle.State   `json:"state"`
	Message     string         `json:"message,omitempty"`
	LastApplied time.Time      `json:"lastApplied,omitzero"`
	// Hub is the uid of the hub that delivered the bundle, "" where that is not known.
	Hub string `json:"hub,omitempty"`
	// Leave says, while State is Removing, that the objects stay.
	Leave bool `json:"leave,omitempty"`
	// Suspended says that nothing is healed or tried again until the bundle is converged.
	Suspended bool `json:"suspended,omitempty"`
	// Releases is how far the Helm releases of the bundle are.
	Releases []releaseState `json:"releases,omitempty"`
	// ContentChunks and InventoryChunks name the Secrets that hold what is too big for the head Secret.
	ContentChunks   []string `json:"contentChunks,omitempty"`
	InventoryChunks []string `json:"inventoryChunks,omitempty"`
}

// stored is a compressed value: in the head Secret, or in the chunks that the head names.
type stored struct {
	inline []byte
	chunks []string
}

func (s stored) empty() bool { return len(s.inline) == 0 && len(s.chunks) == 0 }

// edit returns a copy of r to change and save.
func (r *record) edit() *record {
	next := *r
	next.inventory = maps.Clone(r.inventory)
	if next.inventory == nil {
		next.inventory = map[kube.Ref]held{}
	}
	next.Releases = slices.Clone(r.Releases)
	for i := range next.Releases {
		next.Releases[i].Hooks = slices.Clone(next.Releases[i].Hooks)
		next.Releases[i].Abandoned = slices.Clone(next.Releases[i].Abandoned)
	}
	return &next
}

func (r *record) digest() bundle.Digest { return bundle.DigestFromBytes(r.Digest) }

// equal says whether saving next would change nothing but the clock.
func (r *record) equal(next *record) bool {
	return r.version != "" && r.digest() == next.digest() && r.State == next.State && r.Message == next.Message &&
		r.Hub == next.Hub && r.Leave == next.Leave && r.Suspended == next.Suspended && maps.Equal(r.inventory, next.inventory) &&
		reflect.DeepEqual(r.Releases, next.Releases)
}

// covers says whether r already promises everything that next does, so that next need not be saved before the first write.
func (r *record) covers(next *record) bool {
	if r.version == "" || r.digest() != next.digest() || r.State == bundle.StateRemoving || r.Suspended ||
		!reflect.DeepEqual(r.Releases, next.Releases) {
		return false
	}
	for key, item := range next.inventory {
		// A UID that is only learned can wait; one that is no longer true cannot.
		if had, ok := r.inventory[key]; !ok || (had.UID != item.UID && had.UID != "") || had.Adopted != item.Adopted {
			return false
		}
	}
	return true
}

// report is what the member says of the bundle.
func (r *record) report() bundle.Report {
	return bundle.Report{
		ID: r.ID, Digest: r.digest(), State: r.State, Message: r.Message, Kinds: r.kinds(), LastApplied: r.LastApplied,
	}
}

// kinds lists the kinds of the objects that are there, as "Kind.version.group".
func (r *record) kinds() []string {
	set := map[string]bool{}
	for _, item := range r.inventory {
		if item.UID != "" {
			set[fmt.Sprintf("%s.%s.%s", item.Ref.Kind, item.Ref.Version, item.Ref.Group)] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// listed returns the inventory in a fixed order.
func (r *record) listed() []held {
	return slices.SortedFunc(maps.Values(r.inventory), func(a, b held) int { return kube.CompareRefs(a.Ref, b.Ref) })
}

// doomed lists what the record holds and keep does not, in groups of equal rank, the highest rank first: the order of removal.
func (r *record) doomed(keep map[kube.Ref]bool) [][]held {
	var items []held
	for key, item := range r.inventory {
		if !keep[key] {
			items = append(items, item)
		}
	}
	slices.SortFunc(items, func(a, b held) int {
		return cmp.Or(cmp.Compare(rankOf(b.Ref.GVK().GroupKind()), rankOf(a.Ref.GVK().GroupKind())), kube.CompareRefs(a.Ref, b.Ref))
	})
	var groups [][]held
	for i, item := range items {
		if i == 0 || rankOf(item.Ref.GVK().GroupKind()) != rankOf(items[i-1].Ref.GVK().GroupKind()) {
			groups = append(groups, nil)
		}
		groups[len(groups)-1] = append(groups[len(groups)-1], item)
	}
	return groups
}

// pack compresses a value as JSON.
func pack(value any) ([]byte, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("compress: %w", err)
	}
	defer encoder.Close()
	return encoder.EncodeAll(raw, nil), nil
}

// unpack is the reverse of pack.
func unpack(packed []byte, into any) error {
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	defer decoder.Close()
	raw, err := decoder.DecodeAll(packed, nil)
	if err != nil {
		return fmt.Errorf("decompress: %w", err)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return nil
}
