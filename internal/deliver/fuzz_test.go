package deliver

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzDecompress reads foreign payloads, and payloads of compress.
func FuzzDecompress(f *testing.F) {
	c, err := newChunker()
	if err != nil {
		f.Fatal(err)
	}
	payload, _ := c.compress(bytes.Repeat([]byte("a: b\n"), 1000))
	f.Add(payload)
	f.Add(c.encoder.EncodeAll(make([]byte, maxStream+1), nil))
	f.Add([]byte("\x28\xb5\x2f\xfd"))
	f.Add([]byte("a: b\n---\na: c\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		var stream []byte
		var err error
		// The reader of the stream doubles its buffer.
		fuzzing.Within(t, 10*maxStream, func() { stream, err = decompress(raw) })
		if err == nil && len(stream) > maxStream {
			t.Errorf("got %d bytes", len(stream))
		}
		if err != nil && !errors.Is(err, ErrCorrupt) {
			t.Errorf("got %v, want ErrCorrupt", err)
		}
		fuzzing.OneLine(t, err)
		packed, ok := c.compress(raw)
		if !ok {
			return
		}
		if again, err := decompress(packed); err != nil || !bytes.Equal(again, raw) {
			t.Errorf("got %q, %v after compressing and decompressing %q", again, err, raw)
		}
	})
}

// FuzzDecodeBundle decodes chunks with any header and documents. Content with the hash of the group is decoded or
// refused as corrupt; other content is refused.
func FuzzDecodeBundle(f *testing.F) {
	c, err := newChunker()
	if err != nil {
		f.Fatal(err)
	}
	for _, head := range []string{`{"item":{}}`, `{"item":{"Release":{"Name":"a","Namespace":"b"}}}`, `{"item":{"Objects":null},"continues":"item"}`, `{"item":{},"continues":"document"}`} {
		f.Add(head, []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`+"\n"), `{"item":{},"continues":"item"}`, []byte(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}`), false)
	}
	f.Add(`{"item":{"Release":{}}}`, []byte(`{"apiVersion":"towline.dev/v1","kind":"ReleaseData","data":{"Notes":"x","Values":{"a":1}}}`+"\n"), `{"item":{},"continues":"document"}`, []byte("---\na: b"), true)
	f.Fuzz(func(t *testing.T, firstHead string, first []byte, secondHead string, second []byte, isWrong bool) {
		parts := &decoder{}
		var group libv1beta1.ConfigurationGroup
		group.Annotations = map[string]string{annotationOutline: `{}`}
		decode := func() (bundle.Bundle, error) {
			for _, part := range []struct {
				head   string
				stream []byte
			}{{firstHead, first}, {secondHead, second}} {
				payload, ok := c.compress(part.stream)
				if !ok || part.head == "" {
					t.Skip("the agent does not get such a chunk")
				}
				obj := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{annotationHeader: part.head}}}
				obj.Spec.Payload = payload
				sum := sha256.Sum256(canonicalContent(part.head, part.stream))
				if isWrong {
					sum[0]++
				}
				if err := parts.add(libv1beta1.ConfigurationItem{Hash: sum[:]}, obj, nil); err != nil {
					return bundle.Bundle{}, err
				}
			}
			return parts.result(&group)
		}
		var b bundle.Bundle
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(first)+len(second))*20_000, func() { b, err = decode() })
		if isWrong && !errors.Is(err, ErrCorrupt) {
			t.Errorf("content with another hash: %v, want ErrCorrupt", err)
		}
		if err == nil && len(b.Items) > 2 {
			t.Errorf("%d items", len(b.Items))
		}
		for _, item := range parts.items {
			for _, object := range item.Objects {
				if object.GetKind() == "" {
					t.Errorf("an object without a kind: %v", object.Object)
				}
			}
		}
	})
}

// FuzzBundlesRoundTrip delivers the objects of a manifest.
func FuzzBundlesRoundTrip(f *testing.F) {
	f.Add([]byte("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {a: \"---\\n\"}\n---\napiVersion: v1\nkind: Secret\nmetadata: {name: b}\n"), "notes\n---\n", `{"a":1}`)
	f.Add([]byte("{\"apiVersion\":\"v1\",\"kind\":\"X\",\"metadata\":{\"name\":\"a\"},\"spec\":[1.5,9007199254740993,null,\"<\u2028>\"]}"), "", "")
	f.Fuzz(func(t *testing.T, manifest []byte, notes, values string) {
		objects, err := kube.DecodeManifest(manifest)
		if err != nil {
			t.Skip("not a manifest")
		}
		item := bundle.Item{Objects: objects}
		// The hub reads both texts as JSON from a child process, so they are UTF-8.
		notes = strings.ToValidUTF8(notes, "\uFFFD")
		if json.Valid([]byte(values)) && utf8.ValidString(values) {
			item.Release = &bundle.Release{Name: "a", Namespace: "b", Data: bundle.ReleaseData{Notes: notes, Values: json.RawMessage(values)}}
		}
		b := testBundle(item, bundle.Item{Objects: objects})
		group, bundles := pack(t, b)
		got, err := unpack(group, bundles)
		if err != nil {
			t.Fatalf("decode an encoded bundle: %v", err)
		}
		for i := range b.Items {
			if len(got.Items) <= i {
				t.Fatalf("%d items, want %d", len(got.Items), len(b.Items))
			}
			if diff := cmp.Diff(b.Items[i].Objects, got.Items[i].Objects); len(objects) > 0 && diff != "" {
				t.Errorf("objects of item %d (-want +got):\n%s", i, diff)
			}
		}
	})
}

// FuzzDecodeForeignBundle decodes the resources of a ConfigurationBundle of another hub.
func FuzzDecodeForeignBundle(f *testing.F) {
	f.Add("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n", `{"apiVersion":"v1","kind":"List","items":[]}`, []byte{})
	f.Add("a: &a [x, x]\nb: [*a, *a]\n", "{", []byte{1})
	f.Add("null", "# comment", []byte{})
	f.Fuzz(func(t *testing.T, first, second string, hash []byte) {
		obj := &libv1beta1.ConfigurationBundle{}
		obj.Spec.Resources = []string{first, second}
		parts := &decoder{}
		var err error
		fuzzing.Within(t, 64<<20+uint64(len(first)+len(second))*20_000, func() { err = parts.add(libv1beta1.ConfigurationItem{Hash: hash}, obj, nil) })
		if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrUnsupported) {
			t.Errorf("got %v, want ErrCorrupt", err)
		}
		if err == nil && len(hash) > 0 && !resourcesMatch(hash, parts.items[0].Objects) {
			t.Errorf("accepted with another hash: %x", hash)
		}
	})
}

// FuzzDecodeGroup decodes groups of other hubs, and outlines of bundles. An accepted bundle of Towline has the digest
// of its group.
func FuzzDecodeGroup(f *testing.F) {
	f.Add([]byte(`{"metadata":{"annotations":{"towline.dev/bundle":"{}"}},"spec":{"requestorHash":"AA=="}}`))
	f.Add([]byte(`{"metadata":{"annotations":{"towline.dev/bundle":"{\"Items\":[{},{}],\"releases\":[{\"Name\":\"a\"}]}"}},"status":{"failureMessage":"a\nb"}}`))
	f.Add([]byte(`{"metadata":{"labels":{"a":"b"}},"spec":{"configurationItems":[{"name":"a"}],"driftExclusions":[{"paths":["/spec"]}]},"status":{"deploymentStatus":"Failed"}}`))
	f.Add([]byte(`{"metadata":{"annotations":{"towline.dev/bundle":"null"}}}`))
	empty := bundle.Bundle{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "a", Feature: "Resources"}}
	digest, err := empty.Digest()
	if err != nil {
		f.Fatal(err)
	}
	own, err := deployGroup(fleet.Member{Namespace: "eu", Name: "eu-1", DeliveryNamespace: "eu", Mode: fleet.Pull}, empty, digest, nil)
	if err != nil {
		f.Fatal(err)
	}
	raw, err := json.Marshal(own)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Fuzz(func(t *testing.T, raw []byte) {
		group := &libv1beta1.ConfigurationGroup{}
		if json.Unmarshal(raw, group) != nil {
			t.Skip("the API server does not return such a group")
		}
		fuzzing.Within(t, 64<<20+uint64(len(raw))*2000, func() {
			b, err := (&decoder{}).result(group)
			fuzzing.OneLine(t, err)
			if err != nil && !errors.Is(err, ErrCorrupt) {
				t.Errorf("got %v, want ErrCorrupt", err)
			}
			if err != nil || !isFromTowline(group) {
				return
			}
			if digest, err := b.Digest(); err != nil || digest != bundle.DigestFromBytes(group.Spec.RequestorHash) {
				t.Errorf("a bundle with digest %s was accepted, error %v", digest, err)
			}
		})
	})
}

// FuzzUnrequested decodes the bundles that an agent lists on its Lease. The list is limited, has each ID once and only
// valid names of objects. An agent can only set the fields that AgentSource.Unrequested sends.
func FuzzUnrequested(f *testing.F) {
	const entry = `{"id":{"requestorKind":"ClusterSummary","requestorName":"left","feature":"Helm"},"owner":{"kind":"Profile","name":"eu/left","tier":100},"hub":"uid","removing":true,"leave":true}`
	f.Add("[" + entry + "]")
	f.Add("[" + entry + "," + entry + "," + strings.ReplaceAll(entry, "left", "other") + "]")
	var many []string
	for i := range 2 * maxUnrequested {
		many = append(many, strings.ReplaceAll(entry, "left", fmt.Sprintf("left-%d", i)))
	}
	f.Add("[" + strings.Join(many, ",") + "]")
	f.Add(strings.Replace("["+entry+"]", `"hub"`, `"Requested":true,"report":{"State":"Applied"},"Releases":[{"Name":"a"}],"Inputs":"x","hub"`, 1))
	f.Add(strings.Replace("["+entry+"]", "100", "99999999999999999999", 1))
	f.Add(strings.Replace("["+entry+"]", "100", "1e400", 1))
	f.Add(strings.Replace("["+entry+"]", `"left"`, `"../left\n"`, 1))
	f.Add(strings.Replace("["+entry+"]", `"left"`, `"a; b $(c)"`, 1))
	f.Add(strings.Replace("["+entry+"]", `"eu/left"`, `"eu/left/\u0000"`, 1))
	f.Add(strings.Replace("["+entry+"]", `"Helm"`, `"`+strings.Repeat("H", 64)+`"`, 1))
	f.Add(strings.Replace("["+entry+"]", `"Helm"`, "\"\xff\"", 1))
	f.Add(`[{"id":{"id":` + strings.Repeat("[", 20_000))
	f.Add("[" + strings.Repeat("{},", 20_000) + "{}]")
	f.Add(`{"id":null}`)
	f.Add("[null]")
	f.Add("null")
	f.Fuzz(func(t *testing.T, text string) {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.AnnotationUnrequested: text}}}
		var listed []bundle.Deployed
		fuzzing.Within(t, 16<<20+uint64(len(text))*2000, func() { listed = unrequestedOn(lease) })
		if len(listed) > maxUnrequested {
			t.Errorf("%d bundles, want at most %d", len(listed), maxUnrequested)
		}
		known := map[bundle.ID]bool{}
		for _, d := range listed {
			if known[d.ID] {
				t.Errorf("%s is listed twice", d.ID)
			}
			known[d.ID] = true
			checkUnrequested(t, d)
		}
		raw, err := json.Marshal(listed)
		if err != nil {
			t.Fatal(err)
		}
		lease.Annotations[kube.AnnotationUnrequested] = string(raw)
		if diff := cmp.Diff(listed, unrequestedOn(lease), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("another list after encoding and decoding (-first +second):\n%s", diff)
		}
	})
}

// checkUnrequested checks that a bundle that an agent lists has names that the hub can use in labels, requests and
// messages, and no fields that only the hub sets.
func checkUnrequested(t *testing.T, d bundle.Deployed) {
	t.Helper()
	group := newGroup(fleet.Member{Namespace: "eu", Name: "eu-1", DeliveryNamespace: "eu"}, d.ID)
	if id, ok := IDOf(group); !ok || id != d.ID {
		t.Errorf("the group for %q is for %q", d.ID, id)
	}
	for key, value := range group.Labels {
		if problems := validation.IsValidLabelValue(value); len(problems) > 0 {
			t.Errorf("label %s=%q of the group: %s", key, value, problems)
		}
	}
	for _, name := range []string{d.ID.String(), d.Owner.Kind, d.Owner.Name} {
		if strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) || strings.ContainsAny(name, " ;$`'\"|&<>*") || slices.Contains(strings.Split(name, "/"), "..") {
			t.Errorf("the name %q is accepted", name)
		}
	}
	if !cmp.Equal(d, bundle.Deployed{ID: d.ID, Owner: d.Owner, Hub: d.Hub, Removing: d.Removing, Orphan: d.Orphan}) {
		t.Errorf("the agent has set fields of the hub: %+v", d)
	}
}
