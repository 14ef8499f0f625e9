package deliver

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/towline/towline/internal/bundle"
)

// cachedItems is the number of cached encoded items. Members with the same item use the same chunks.
const cachedItems = 64

// encoder encodes items as chunks. It compresses the same item once, and not once per member.
type encoder struct {
	key Key

	// mu guards chunker and cache. It is held while an item is compressed, so that concurrent deliveries of the same item
	// compress it once.
	mu      sync.Mutex
	chunker *chunker
	cache   map[[sha256.Size]byte][]chunk
}

func newEncoder(key Key) (*encoder, error) {
	chunker, err := newChunker()
	if err != nil {
		return nil, err
	}
	return &encoder{key: key, chunker: chunker, cache: map[[sha256.Size]byte][]chunk{}}, nil
}

// encode returns the chunks of b in order: at least one per item.
func (e *encoder) encode(b bundle.Bundle) ([]chunk, error) {
	var chunks []chunk
	total := 0
	for _, item := range b.Items {
		docs, err := documents(item)
		if err != nil {
			return nil, fmt.Errorf("encode bundle %s: %w", b.ID, err)
		}
		for _, doc := range docs {
			total += len(doc)
		}
		if total > maxContent {
			return nil, fmt.Errorf("encode bundle %s: it is larger than %d bytes", b.ID, maxContent)
		}
		more, err := e.encodeItem(item, docs)
		if err != nil {
			return nil, fmt.Errorf("encode bundle %s: %w", b.ID, err)
		}
		chunks = append(chunks, more...)
	}
	return chunks, nil
}

// encodeItem returns the chunks of one item whose objects are docs.
func (e *encoder) encodeItem(item bundle.Item, docs [][]byte) ([]chunk, error) {
	outline := outlineOf(item)
	id, err := hashItem(outline, item.OnlySecretsPrivate, docs)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if chunks, ok := e.cache[id]; ok {
		return chunks, nil
	}
	parts := e.chunker.splitItem(item, docs)
	chunks := make([]chunk, 0, len(parts))
	for i, p := range parts {
		raw, err := json.Marshal(header{Item: outline, Continues: p.continues})
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", sourceOf(item), err)
		}
		content := canonical(string(raw), p.stream)
		chunks = append(chunks, chunk{
			item: outline, private: p.private, last: i == len(parts)-1, index: i,
			header: string(raw), payload: p.payload, hash: sha256.Sum256(content), name: e.key.bundleName(content),
		})
	}
	if len(e.cache) >= cachedItems {
		clear(e.cache)
	}
	e.cache[id] = chunks
	return chunks, nil
}

// hashItem returns a hash of the contents of an item's chunks and of the choice which ones are private.
func hashItem(outline bundle.Item, onlySecretsPrivate bool, docs [][]byte) (id [sha256.Size]byte, err error) {
	hash := sha256.New()
	_, _ = fmt.Fprintln(hash, onlySecretsPrivate) // a hash returns no error
	if err := json.NewEncoder(hash).Encode(outline); err != nil {
		return id, fmt.Errorf("encode %s: %w", sourceOf(outline), err)
	}
	for _, doc := range docs {
		_, _ = hash.Write(doc)
	}
	return [sha256.Size]byte(hash.Sum(nil)), nil
}
