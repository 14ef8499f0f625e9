package deliver

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// The limits of one ConfigurationBundle and of one bundle.Bundle.
const (
	// maxPayload limits the compressed bytes per ConfigurationBundle. In base64 it is less than half of etcd's limit for a
	// request.
	maxPayload = 512 << 10
	// maxStream limits the decompressed bytes per ConfigurationBundle, and with it the memory of a reader.
	maxStream = 8 << 20
	// maxContent limits the documents of a bundle in bytes, and with it the memory of a reader. It is half of the
	// default quota of etcd, which stores them on a member.
	maxContent = 1 << 30
	// separator separates two documents of a stream. A document is JSON in one line, so it does not have the separator.
	separator = "---\n"
)

// ErrCorrupt is the error of content whose hash differs from the group's, or that cannot be decoded.
var ErrCorrupt = errors.New("content is corrupt")

// The values of header.Continues.
const (
	continuesItem     = "item"     // the stream has further documents of the previous chunk's item
	continuesDocument = "document" // the stream continues the last document of the previous chunk
)

// header has the data of a chunk without its documents. It is stored and hashed as text, so that a reader with another
// version of the API types computes the same hash.
type header struct {
	// Item is the item without its objects and its release data. An empty list of objects stays, since the digest
	// distinguishes it from nil.
	Item bundle.Item `json:"item"`
	// Continues is "" for the first chunk of an item. Otherwise it is a constant that describes how the chunk continues
	// the previous one.
	Continues string `json:"continues,omitempty"`
}

// chunk is the content of one ConfigurationBundle. It must not be changed, since the encoder caches chunks.
type chunk struct {
	item    bundle.Item // from itemOutline
	private bool        // the chunk may be stored only in the member's own delivery namespace
	last    bool        // the chunk is the last one of its item
	index   int         // the number of the chunk in its item
	size    int         // the size of the stream in bytes
	header  string
	payload []byte      // zstd
	key     *contentKey // encrypts the payload when the chunk is written; nil for none
	hash    [sha256.Size]byte
	name    string
}

// canonicalContent returns the bytes that identify a chunk: its header, a newline and its stream. The stream is not
// compressed, since the result of the compression depends on the version of the library.
func canonicalContent(header string, stream []byte) []byte {
	raw := make([]byte, 0, len(header)+1+len(stream))
	raw = append(raw, header...)
	raw = append(raw, '\n')
	return append(raw, stream...)
}

// releaseDataKind is the kind of the document that holds the bundle.ReleaseData of an item. It comes before the objects
// of the item.
const releaseDataKind = "ReleaseData"

// releaseDocument is the document with the ReleaseData.
type releaseDocument struct {
	metav1.TypeMeta `json:",inline"`
	Data            bundle.ReleaseData `json:"data"`
}

// encodeDocuments returns the release data and the objects of item as canonical JSON, each on one line. It fails for
// objects without a kind or a JSON form.
func encodeDocuments(item bundle.Item) ([][]byte, error) {
	docs := make([][]byte, 0, len(item.Objects)+1)
	if item.Release != nil && !item.Release.Data.IsZero() {
		raw, err := json.Marshal(releaseDocument{
			TypeMeta: metav1.TypeMeta{APIVersion: "towline.dev/v1", Kind: releaseDataKind}, Data: item.Release.Data,
		})
		if err != nil {
			return nil, fmt.Errorf("encode the data of %s: %w", describeSource(item), err)
		}
		docs = append(docs, append(raw, '\n'))
	}
	for i, obj := range item.Objects {
		if obj == nil || obj.GetKind() == "" || obj.GetAPIVersion() == "" {
			return nil, fmt.Errorf("encode object %d of %s: it has no kind or no apiVersion", i, describeSource(item))
		}
	}
	encoded, err := item.Documents.Encode(item.Objects)
	if err != nil {
		return nil, err
	}
	for _, raw := range encoded {
		docs = append(docs, slices.Concat(raw, []byte("\n")))
	}
	return docs, nil
}

// takeReleaseData moves the release data at the beginning of stream into item, and returns the rest. Values and chart
// metadata stay raw JSON, since the digest depends on the order of their keys.
func takeReleaseData(item *bundle.Item, stream []byte) (rest []byte) {
	if item.Release == nil {
		return stream
	}
	first, rest, _ := bytes.Cut(stream, []byte("\n"+separator))
	var doc releaseDocument
	if err := json.Unmarshal(first, &doc); err != nil || doc.Kind != releaseDataKind {
		return stream // an object, which may be YAML
	}
	release := *item.Release
	release.Data = doc.Data
	item.Release = &release
	return rest
}

// itemOutline returns item without its documents.
func itemOutline(item bundle.Item) bundle.Item {
	if len(item.Objects) > 0 {
		item.Objects = nil // an empty list stays: its digest differs from the digest of nil
	}
	if item.Release != nil {
		release := *item.Release
		release.Data = bundle.ReleaseData{}
		item.Release = &release
	}
	return item
}

// describeSource names the origin of an item for messages.
func describeSource(item bundle.Item) string {
	switch {
	case item.Release != nil:
		return "release " + item.Release.Namespace + "/" + item.Release.Name
	case item.Reference.Kind != "":
		return item.Reference.String()
	default:
		return "item"
	}
}

// isPrivate returns whether obj, an object of item, may be stored only in the member's own delivery namespace. obj is
// nil for the release data.
func isPrivate(item bundle.Item, obj *unstructured.Unstructured) bool {
	isSecret := obj != nil && obj.GroupVersionKind().GroupKind() == schema.GroupKind{Kind: "Secret"}
	return isSecret || (item.Sensitive && !item.OnlySecretsPrivate)
}

// piece is the part of an item's stream that one chunk has.
type piece struct {
	private   bool
	continues string
	stream    []byte
	payload   []byte
}

// chunker splits the documents of an item into pieces that fit into chunks. It is safe for concurrent use.
type chunker struct{ encoder *zstd.Encoder }

func newChunker() (*chunker, error) {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(runtime.GOMAXPROCS(0)), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("make compressor: %w", err)
	}
	return &chunker{encoder: encoder}, nil
}

// splitItem splits the documents of item. Private documents and other ones are in different pieces, so that a Secret
// does not make the other objects of a chart private. The order of the documents stays.
func (c *chunker) splitItem(item bundle.Item, docs [][]byte) []piece {
	private := make([]bool, len(docs))
	firstObject := len(docs) - len(item.Objects) // after the release data
	for i := range docs {
		var obj *unstructured.Unstructured
		if i >= firstObject {
			obj = item.Objects[i-firstObject]
		}
		private[i] = isPrivate(item, obj)
	}
	if len(docs) == 0 {
		return c.splitDocuments(nil, "", isPrivate(item, nil))
	}
	var pieces []piece
	continues := ""
	for begin := 0; begin < len(docs); {
		end := begin + 1
		for end < len(docs) && private[end] == private[begin] {
			end++
		}
		pieces = append(pieces, c.splitDocuments(docs[begin:end], continues, private[begin])...)
		continues, begin = continuesItem, end
	}
	return pieces
}

// splitDocuments halves docs until each half fits into a chunk. A single document that does not fit is split at a byte.
// continues is header.Continues of the first piece.
func (c *chunker) splitDocuments(docs [][]byte, continues string, private bool) []piece {
	stream := bytes.Join(docs, []byte(separator))
	if len(docs) <= 1 {
		return c.splitBytes(stream, continues, private)
	}
	if payload, ok := c.compress(stream); ok {
		return []piece{{private: private, continues: continues, stream: stream, payload: payload}}
	}
	half := len(docs) / 2
	return append(c.splitDocuments(docs[:half], continues, private), c.splitDocuments(docs[half:], continuesItem, private)...)
}

// splitBytes halves stream until each half fits into a chunk.
func (c *chunker) splitBytes(stream []byte, continues string, private bool) []piece {
	if payload, ok := c.compress(stream); ok {
		return []piece{{private: private, continues: continues, stream: stream, payload: payload}}
	}
	half := len(stream) / 2
	return append(c.splitBytes(stream[:half], continues, private), c.splitBytes(stream[half:], continuesDocument, private)...)
}

// compress compresses stream; ok is false if the stream or the result is too long for one chunk.
func (c *chunker) compress(stream []byte) (payload []byte, ok bool) {
	if len(stream) > maxStream {
		return nil, false
	}
	payload = c.encoder.EncodeAll(stream, nil)
	return payload, len(payload) <= maxPayload
}

// decompress returns the stream in payload. It fails with ErrCorrupt if the payload is invalid or the stream longer
// than maxStream. It accepts twice the payload that this version writes, so that a later version can write larger ones.
func decompress(payload []byte) ([]byte, error) {
	if len(payload) > 2*maxPayload {
		return nil, fmt.Errorf("%w: a payload of %d bytes", ErrCorrupt, len(payload))
	}
	decoder, err := zstd.NewReader(bytes.NewReader(payload), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(maxStream), zstd.WithDecoderMaxMemory(2*maxStream))
	if err != nil {
		return nil, fmt.Errorf("%w: decompress: %w", ErrCorrupt, err)
	}
	defer decoder.Close()
	stream, err := io.ReadAll(io.LimitReader(decoder, maxStream+1))
	if err != nil {
		return nil, fmt.Errorf("%w: decompress: %w", ErrCorrupt, err)
	}
	if len(stream) > maxStream {
		return nil, fmt.Errorf("%w: it decompresses to more than %d bytes", ErrCorrupt, maxStream)
	}
	return stream, nil
}

// parseStream returns the objects of a stream of documents.
func parseStream(stream []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	for doc := range bytes.SplitSeq(stream, []byte("\n"+separator)) {
		var err error
		if objects, err = parseDocument(objects, doc); err != nil {
			return nil, err
		}
	}
	return objects, nil
}

// parseDocument appends the object in doc, JSON or YAML, to objects. doc may be empty.
func parseDocument(objects []*unstructured.Unstructured, doc []byte) ([]*unstructured.Unstructured, error) {
	doc = bytes.TrimSpace(doc)
	if len(doc) == 0 {
		return objects, nil
	}
	if doc[0] != '{' {
		raw, err := kube.YAMLToJSON(doc)
		if err != nil {
			return nil, fmt.Errorf("%w: parse document: %w", ErrCorrupt, err)
		}
		if doc = raw; string(doc) == "null" {
			return objects, nil
		}
	}
	obj := &unstructured.Unstructured{}
	if err := obj.UnmarshalJSON(doc); err != nil {
		return nil, fmt.Errorf("%w: parse document: %w", ErrCorrupt, err)
	}
	return append(objects, obj), nil
}
