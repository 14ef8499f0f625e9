package kube

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/yaml"
)

// MaxObjects is the maximum number of objects in one manifest, chart or bundle. It limits the memory of the hub and of
// the agents, and is a hundred times the number of objects of the largest charts in test/charts.
const MaxObjects = 20_000

// MaxValues is the maximum number of values in the objects of one bundle.
const MaxValues = maxStreamValues

// maxDocument is the maximum size of one document in bytes. The API server takes no object of more than 3 MiB, and
// decoding takes up to a hundred times the memory of the text.
const maxDocument = 4 << 20

// manifestByteCost and manifestValueCost are the memory to decode a manifest, for each byte and for each value that
// CountValues counts. They are the highest measured costs, of text and of maps with one field, rounded up.
const (
	manifestByteCost  = 4
	manifestValueCost = 400
)

// MemoryOfManifest returns the estimate of the memory to decode a manifest with a size in bytes and a result of
// CountValues.
func MemoryOfManifest(size, values int) int64 {
	return int64(size)*manifestByteCost + int64(values)*manifestValueCost
}

// DecodeManifest decodes the Kubernetes objects in a stream of YAML or JSON documents, in order. A list is replaced by
// its items. Errors name the document, counted from one without the empty ones, and the line. A duplicate key is an
// error, and so are more than MaxObjects objects.
func DecodeManifest(stream []byte) ([]*unstructured.Unstructured, error) {
	objects, _, err := decodeStream(stream, yaml.YAMLToJSONStrict, nil)
	return objects, err
}

// DecodeManifestReserving is DecodeManifest, and reserves memory before it decodes. Afterwards added bytes stay
// reserved for the objects. The caller must subtract them after use.
func DecodeManifestReserving(reserved *ContentReservation, stream []byte) (objects []*unstructured.Unstructured, added int64, err error) {
	return decodeStream(stream, yaml.YAMLToJSONStrict, reserved)
}

// DecodeLenient is DecodeManifest, but uses the last value of a duplicate key.
func DecodeLenient(stream []byte) ([]*unstructured.Unstructured, error) {
	objects, _, err := decodeStream(stream, yaml.YAMLToJSON, nil)
	return objects, err
}

// DecodeHelmManifest is DecodeLenient, but adds a line break to each document, as Helm does in the manifest of a
// release. A block scalar at the end of a document may then end with the line break.
func DecodeHelmManifest(stream []byte) ([]*unstructured.Unstructured, error) {
	objects, _, err := decodeStream(stream, func(text []byte) ([]byte, error) {
		raw, err := yaml.YAMLToJSON(append(text[:len(text):len(text)], '\n'))
		if err != nil {
			// The line in the error must be a line of the original text.
			if _, textErr := yaml.YAMLToJSON(text); textErr != nil {
				err = textErr
			}
		}
		return raw, err
	}, nil)
	return objects, err
}

// document is one document of a YAML stream, and its position in the stream.
type document struct {
	number int // counted from one; empty documents do not count
	line   int // the line of the stream on which text begins
	text   []byte
}

// splitDocuments splits a YAML stream at its separators. It omits documents with only blanks and comments.
func splitDocuments(stream []byte) []document {
	var found []document
	current := document{line: 1}
	flush := func(next int) {
		if !isBlank(current.text) {
			current.number = len(found) + 1
			found = append(found, current)
		}
		current = document{line: next}
	}
	line := 0
	for rest := bytes.TrimPrefix(stream, []byte("\ufeff")); len(rest) > 0; {
		line++
		end := bytes.IndexByte(rest, '\n') + 1
		if end == 0 {
			end = len(rest)
		}
		text := rest[:end]
		rest = rest[end:]
		if after, cut := bytes.CutPrefix(text, []byte("---")); cut && (len(after) == 0 || bytes.ContainsAny(after[:1], " \t\r\n")) {
			flush(line)
			text = bytes.TrimLeft(after, " \t") // content may follow a separator on its line
		}
		if current.text == nil {
			current.text = text[:len(text):len(text)]
			continue
		}
		current.text = append(current.text, text...)
	}
	flush(line)
	return found
}

func isBlank(text []byte) bool {
	for line := range bytes.Lines(text) {
		if trimmed := bytes.TrimSpace(line); len(trimmed) > 0 && trimmed[0] != '#' {
			return false
		}
	}
	return true
}

// firstLine returns the line of the stream on which the content of d begins.
func (d document) firstLine() int {
	line := d.line
	for text := range bytes.Lines(d.text) {
		if !isBlank(text) {
			return line
		}
		line++
	}
	return line
}

// converter converts YAML to JSON. Converters differ in their result for a duplicate key: an error or the last value.
type converter func([]byte) ([]byte, error)

// decodeStream implements the exported Decode functions. A nil reserved has no limit.
func decodeStream(stream []byte, convert converter, reserved *ContentReservation) (all []*unstructured.Unstructured, added int64, err error) {
	if countIndicators(stream) > maxStreamValues {
		return nil, 0, fmt.Errorf("it has more than %d values", maxStreamValues)
	}
	if err := reserved.Add(int64(len(stream))); err != nil { // splitDocuments may copy the text
		return nil, 0, err
	}
	defer reserved.Subtract(int64(len(stream)))
	defer func() {
		if err != nil {
			reserved.Subtract(added)
			all, added = nil, 0
		}
	}()
	values := 0
	for _, doc := range splitDocuments(stream) {
		found, memory, err := doc.decode(convert, reserved, &values)
		added += memory
		if all = append(all, found...); err == nil && len(all) > MaxObjects {
			err = fmt.Errorf("there are more than %d objects", MaxObjects)
		}
		if _, isLocated := errors.AsType[locatedError](err); isLocated {
			return all, added, fmt.Errorf("document %d, %w", doc.number, err)
		}
		if err != nil {
			return all, added, fmt.Errorf("document %d, line %d: %w", doc.number, doc.firstLine(), err)
		}
	}
	return all, added, nil
}

// locatedError is an error of YAML that has the line in the stream already.
type locatedError string

// Error implements error.
func (e locatedError) Error() string { return string(e) }

// decode returns the objects in a document, for which added bytes stay reserved. values is the number of values in the
// stream so far, to which decode adds the values in this document.
func (d document) decode(convert converter, reserved *ContentReservation, values *int) (objects []*unstructured.Unstructured, added int64, err error) {
	if len(d.text) > maxDocument {
		return nil, 0, fmt.Errorf("it has more than %d MiB", maxDocument>>20)
	}
	counted, needed, err := reserved.AddForYAML(d.text)
	if err != nil {
		return nil, 0, err
	}
	defer func() { reserved.Subtract(needed - added) }()
	if *values += counted; *values > maxStreamValues {
		return nil, 0, errAliases
	}
	raw, err := convert(d.text)
	if err != nil {
		return nil, 0, locatedError(d.locateError(err))
	}
	var content any
	if err := utiljson.Unmarshal(raw, &content); err != nil {
		return nil, 0, err
	}
	if content == nil {
		return nil, 0, nil
	}
	if objects, err = objectsIn(content); err != nil || reserved == nil {
		return objects, 0, err
	}
	return objects, min(needed, MemoryOfValue(content)), nil
}

// locateError returns the text of a YAML error with its line numbers counted from the beginning of the stream.
func (d document) locateError(err error) string {
	text := strings.NewReplacer("error converting YAML to JSON: ", "", "yaml: ", "", "unmarshal errors:\n  ", "", "\n  ", "; ").Replace(err.Error())
	numbers := regexp.MustCompile(`line (\d+)`)
	if !numbers.MatchString(text) {
		return fmt.Sprintf("line %d: %s", d.firstLine(), text)
	}
	return numbers.ReplaceAllStringFunc(text, func(found string) string {
		number, _ := strconv.Atoi(strings.TrimPrefix(found, "line ")) // digits only
		return fmt.Sprintf("line %d", number+d.line-1)
	})
}

// objectsIn returns the object in a decoded document, or the items of a list.
func objectsIn(content any) ([]*unstructured.Unstructured, error) {
	fields, ok := content.(map[string]any)
	if !ok {
		return nil, errors.New("it is not an object with fields")
	}
	kind, _ := fields["kind"].(string)
	items, isList := fields["items"].([]any)
	if !isList || !strings.HasSuffix(kind, "List") {
		object, err := newObject(fields)
		if err != nil {
			return nil, err
		}
		return []*unstructured.Unstructured{object}, nil
	}
	var all []*unstructured.Unstructured
	for i, item := range items {
		setDefaultKind(item, fields["apiVersion"], strings.TrimSuffix(kind, "List"))
		found, err := objectsIn(item)
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// setDefaultKind sets the kind of an item without one in a typed list, for example a ConfigMapList.
func setDefaultKind(item, apiVersion any, kind string) {
	fields, ok := item.(map[string]any)
	if !ok || kind == "" {
		return
	}
	if _, set := fields["kind"]; set {
		return
	}
	fields["kind"] = kind
	if _, set := fields["apiVersion"]; !set {
		fields["apiVersion"] = apiVersion
	}
}

// newObject returns the object with these fields. It fails without apiVersion, kind or metadata.name.
func newObject(fields map[string]any) (*unstructured.Unstructured, error) {
	for _, needed := range [][]string{{"apiVersion"}, {"kind"}, {"metadata", "name"}} {
		text, found, err := unstructured.NestedString(fields, needed...)
		if err != nil {
			return nil, fmt.Errorf("%s is not a string", strings.Join(needed, "."))
		}
		if !found || text == "" {
			return nil, fmt.Errorf("it has no %s", strings.Join(needed, "."))
		}
	}
	return &unstructured.Unstructured{Object: fields}, nil
}
