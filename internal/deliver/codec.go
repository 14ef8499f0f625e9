package deliver

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/bundle"
)

// The limits of what travels in one ConfigurationBundle and in one bundle.Bundle.
const (
	// maxPayload is the most compressed bytes per ConfigurationBundle: a third of what etcd takes in one request, base64 included.
	maxPayload = 512 << 10
	// maxStream is the most bytes that one payload decompresses to, so that a reader knows what memory it needs.
	maxStream = 8 << 20
	// maxContent is the most bytes of documents per bundle. It guards the readers' memory and is far above what etcd would store
	// of the result on a member.
	maxContent = 1 << 30
	// separator is between two documents of a stream. Documents are JSON on one line, so it cannot occur inside one.
	separator = "---\n"
)

// ErrCorrupt is the error of content that is not what the group says it is, or cannot be read.
var ErrCorrupt = errors.New("content is corrupt")

// The values of header.Continues.
const (
	continuesItem     = "item"     // the stream holds further documents of the item before
	continuesDocument = "document" // the stream starts in the middle of the last document of the chunk before
)

// header is everything about a chunk but its documents. It is stored as text, and it is that text which is hashed, so that no
// version of the API types between writer and reader can change it.
type header struct {
	// Item is the item without its objects and its release data. Objects is nil unless the item has an empty list of them.
	Item bundle.Item `json:"item"`
	// Continues says how the chunk follows the chunk before it; "" begins an item.
	Continues string `json:"continues,omitempty"`
}

// chunk is the content of one ConfigurationBundle. Chunks are values: the cache of the Outbox shares them.
type chunk struct {
	item    bundle.Item // without objects
	private bool        // may not leave the member's own delivery namespace
	last    bool        // of its item
	index   int         // within its item
	header  string
	payload []byte // zstd
	hash    [sha256.Size]byte
	name    string
}

// canonical returns the bytes that identify a chunk: its header, a newline and its stream before compression, which another
// version of the compressor would not write in the same way.
func canonical(header string, stream []byte) []byte {
	raw := make([]byte, 0, len(header)+1+len(stream))
	raw = append(raw, header...)
	raw = append(raw, '\n')
	return append(raw, stream...)
}

// releaseDataKind is the kind of the document that holds the bundle.ReleaseData of an item. It comes before the objects of the item.
const releaseDataKind = "ReleaseData"

// releaseDocument is that document.
type releaseDocument struct {
	metav1.TypeMeta `json:",inline"`
	Data            bundle.ReleaseData `json:"data"`
}

// documents returns the release data and the objects of item as canonical JSON, each on one line. It fails for objects without a kind or a
// JSON form.
func documents(item bundle.Item) ([][]byte, error) {
	docs := make([][]byte, 0, len(item.Objects)+1)
	if item.Release != nil && !item.Release.Data.IsZero() {
		raw, err := json.Marshal(releaseDocument{
			TypeMeta: metav1.TypeMeta{APIVersion: "towline.dev/v1", Kind: releaseDataKind}, Data: item.Release.Data,
		})
		if err != nil {
			return nil, fmt.Errorf("encode the data of %s: %w", sourceOf(item), err)
		}
		docs = append(docs, append(raw, '\n'))
	}
	for i, obj := range item.Objects {
		if obj == nil || obj.GetKind() == "" || obj.GetAPIVersion() == "" {
			return nil, fmt.Errorf("encode object %d of %s: it has no kind or no apiVersion", i, sourceOf(item))
		}
		raw, err := json.Marshal(obj.Object)
		if err != nil {
			return nil, fmt.Errorf("encode %s %s/%s: %w", obj.GetKind(), obj.GetNamespace(), obj.GetName(), err)
		}
		docs = append(docs, append(raw, '\n'))
	}
	return docs, nil
}

// takeReleaseData moves the release data at the beginning of stream into item, and returns the rest. The data is kept byte by byte: its digest
// counts the order of its keys.
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

// outlineOf returns item without its documents.
func outlineOf(item bundle.Item) bundle.Item {
	if len(item.Objects) > 0 {
		item.Objects = nil
	}
	if item.Release != nil {
		release := *item.Release
		release.Data = bundle.ReleaseData{}
		item.Release = &release
	}
	return item
}

// sourceOf names the place an item came from, for messages.
func sourceOf(item bundle.Item) string {
	switch {
	case item.Release != nil:
		return "release " + item.Release.Namespace + "/" + item.Release.Name
	case item.Reference.Kind != "":
		return item.Reference.Kind + " " + item.Reference.Namespace + "/" + item.Reference.Name
	default:
		return "item"
	}
}

// private says whether item may only be stored in the member's own delivery namespace. A Secret is private even if nobody said so.
func private(item bundle.Item) bool {
	if item.Sensitive {
		return true
	}
	for _, obj := range item.Objects {
		if obj.GetKind() == "Secret" && obj.GetAPIVersion() == "v1" {
			return true
		}
	}
	return false
}

// part is a stretch of an item's stream that fits into one chunk.
type part struct {
	continues string
	stream    []byte
	payload   []byte
}

// splitter cuts an item's documents into parts that fit.
type splitter struct{ encoder *zstd.Encoder }

func newSplitter() (*splitter, error) {
	// One goroutine, so that the same input has the same output.
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("make compressor: %w", err)
	}
	return &splitter{encoder: encoder}, nil
}

// split halves docs until each half fits, and one document that does not fit alone as bytes. The first part continues as it is told.
func (s *splitter) split(docs [][]byte, continues string) []part {
	stream := bytes.Join(docs, []byte(separator))
	if len(docs) <= 1 {
		return s.splitBytes(stream, continues)
	}
	if payload, ok := s.compress(stream); ok {
		return []part{{continues: continues, stream: stream, payload: payload}}
	}
	half := len(docs) / 2
	return append(s.split(docs[:half], continues), s.split(docs[half:], continuesItem)...)
}

func (s *splitter) splitBytes(stream []byte, continues string) []part {
	if payload, ok := s.compress(stream); ok {
		return []part{{continues: continues, stream: stream, payload: payload}}
	}
	half := len(stream) / 2
	return append(s.splitBytes(stream[:half], continues), s.splitBytes(stream[half:], continuesDocument)...)
}

// compress returns stream compressed; ok is false if either form is too long for one chunk.
func (s *splitter) compress(stream []byte) (payload []byte, ok bool) {
	if len(stream) > maxStream {
		return nil, false
	}
	payload = s.encoder.EncodeAll(stream, nil)
	return payload, len(payload) <= maxPayload
}

// decompress returns the stream in payload, and ErrCorrupt if it is none or longer than maxStream.
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

// parseDocument appends the object in doc, JSON or YAML, to objects. There may be none in it.
func parseDocument(objects []*unstructured.Unstructured, doc []byte) ([]*unstructured.Unstructured, error) {
	doc = bytes.TrimSpace(doc)
	if len(doc) == 0 {
		return objects, nil
	}
	if doc[0] != '{' {
		raw, err := yaml.YAMLToJSON(doc)
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
