package deliver

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/cache"
)

// maxChunksSize limits the cached chunks of an encoder, in bytes. Members with the same item use the same chunks.
const maxChunksSize = 32 << 20

// encoder encodes items as chunks. It compresses an item once for all members. It is safe for concurrent use:
// deliveries of the same item wait for the first one of them.
type encoder struct {
	key     Key
	chunker *chunker
	cache   *cache.Cache[[]chunk] // by hashItem
}

func newEncoder(key Key) (*encoder, error) {
	chunker, err := newChunker()
	if err != nil {
		return nil, err
	}
	return &encoder{key: key, chunker: chunker, cache: cache.New[[]chunk](maxChunksSize)}, nil
}

// encode returns the chunks of b in order: at least one per item.
func (e *encoder) encode(b bundle.Bundle) ([]chunk, error) {
	var chunks []chunk
	total := 0
	for _, item := range b.Items {
		more, err := e.encodeItem(item)
		if err != nil {
			return nil, fmt.Errorf("encode bundle %s: %w", b.ID, err)
		}
		for _, c := range more {
			total += c.size
		}
		if err := checkSize(total); err != nil {
			return nil, fmt.Errorf("encode bundle %s: %w", b.ID, err)
		}
		chunks = append(chunks, more...)
	}
	return chunks, nil
}

// checkSize returns an error if size, the size of documents, is more than maxContent.
func checkSize(size int) error {
	if size > maxContent {
		return fmt.Errorf("it is larger than %d bytes", maxContent)
	}
	return nil
}

// encodeItem returns the chunks of one item.
func (e *encoder) encodeItem(item bundle.Item) ([]chunk, error) {
	outline := itemOutline(item)
	hash, err := hashItem(outline, item)
	if err != nil {
		return nil, err
	}
	return e.cache.GetOrCompute(string(hash), func() ([]chunk, int, error) {
		docs, err := encodeDocuments(item)
		if err != nil {
			return nil, 0, err
		}
		size := 0
		for _, doc := range docs {
			size += len(doc)
		}
		if err := checkSize(size); err != nil {
			return nil, 0, err
		}
		return e.compressItem(outline, item, docs)
	})
}

// compressItem returns the chunks of one item, whose documents are docs, and their size in the cache.
func (e *encoder) compressItem(outline, item bundle.Item, docs [][]byte) ([]chunk, int, error) {
	pieces := e.chunker.splitItem(item, docs)
	chunks := make([]chunk, 0, len(pieces))
	size := 0
	for i, p := range pieces {
		raw, err := json.Marshal(header{Item: outline, Continues: p.continues})
		if err != nil {
			return nil, 0, fmt.Errorf("encode %s: %w", describeSource(item), err)
		}
		content := canonicalContent(string(raw), p.stream)
		chunks = append(chunks, chunk{
			item: outline, private: p.private, last: i == len(pieces)-1, index: i, size: len(p.stream),
			header: string(raw), payload: p.payload, hash: sha256.Sum256(content), name: e.key.contentName(content),
		})
		size += cache.MinSize + len(raw) + len(p.payload)
	}
	return chunks, size, nil
}

// hashItem returns the cache key of an item: a hash of all data that its chunks depend on.
func hashItem(outline, item bundle.Item) ([]byte, error) {
	hash := sha256.New()
	_, _ = fmt.Fprintln(hash, item.OnlySecretsPrivate) // a hash returns no error
	out := json.NewEncoder(hash)
	if err := out.Encode(outline); err != nil {
		return nil, fmt.Errorf("encode %s: %w", describeSource(item), err)
	}
	if item.Release != nil {
		if err := out.Encode(item.Release.Data); err != nil {
			return nil, fmt.Errorf("encode the data of %s: %w", describeSource(item), err)
		}
	}
	digest, err := item.Documents.Digest(item.Objects)
	if err != nil {
		return nil, err
	}
	_, _ = hash.Write(digest[:])
	return hash.Sum(nil), nil
}
