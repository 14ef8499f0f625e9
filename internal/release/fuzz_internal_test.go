package release

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzDecodeRecord reads release records, which anyone with access to Secrets of a member can write. The target gets
// the JSON, or the stored form.
func FuzzDecodeRecord(f *testing.F) {
	f.Add([]byte(`{"name":"a","namespace":"b","version":1,"info":{"status":"deployed"},"chart":{"metadata":{"name":"c"},"values":{"x":[1]}},"manifest":"---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n","hooks":[{"name":"h","manifest":"kind: Job","events":["pre-install"]}]}`), false)
	f.Add([]byte(`{"chart":null,"info":null,"hooks":[null]}`), false)
	f.Add([]byte("H4sIAAAAAAAA"), true)
	f.Add(bytes.Repeat([]byte("["), 20_000), false)
	f.Fuzz(func(t *testing.T, raw []byte, isStored bool) {
		encoded := raw
		if !isStored {
			encoded = storedForm(t, raw)
		}
		fuzzing.Within(t, 3*maxDecodedBytes+uint64(len(raw))*20_000, func() { checkRecord(t, encoded) })
	})
}

func checkRecord(t *testing.T, encoded []byte) {
	t.Helper()
	record, err := decode(t.Context(), encoded, nil)
	fuzzing.OneLine(t, err)
	if err != nil {
		return
	}
	record.Namespace, record.Name = "site", "web" // Store.Get refuses others than it has requested
	item, err := record.Item(t.Context(), bundle.ReleaseOptions{})
	fuzzing.OneLine(t, err)
	if err == nil && len(item.Objects) != len(item.Release.Data.Paths) {
		t.Errorf("%d objects and %d paths", len(item.Objects), len(item.Release.Data.Paths))
	}
	again, err := encode(record.Release)
	if err != nil {
		return // a record of a chart with values that JSON cannot have
	}
	if len(again) > maxEncodedBytes {
		t.Errorf("the record has %d bytes", len(again))
	}
	second, err := decode(t.Context(), again, nil)
	if err != nil {
		t.Fatalf("decode an encoded record: %v", err)
	}
	if second.Name != record.Name || second.Namespace != record.Namespace || second.Version != record.Version {
		t.Errorf("got %s/%s v%d, want %s/%s v%d", second.Namespace, second.Name, second.Version, record.Namespace, record.Name, record.Version)
	}
	if HasManifest(second.Release) && second.Manifest != record.Manifest {
		t.Errorf("got manifest %q, want %q", second.Manifest, record.Manifest)
	}
}

// storedForm returns raw as Helm stores a record.
func storedForm(t *testing.T, raw []byte) []byte {
	t.Helper()
	var packed bytes.Buffer
	writer := gzip.NewWriter(&packed)
	if _, err := writer.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	return []byte(base64.StdEncoding.EncodeToString(packed.Bytes()))
}

// FuzzParseHook reads the annotations of hooks in charts.
func FuzzParseHook(f *testing.F) {
	f.Add("pre-install,post-upgrade", "-5", "hook-succeeded, before-hook-creation")
	f.Add("test-success,,", "9999999999999999999999", "")
	f.Fuzz(func(t *testing.T, events, weight, policies string) {
		object := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "batch/v1", "kind": "Job", "metadata": map[string]any{"name": "a"}}}
		object.SetAnnotations(map[string]string{"helm.sh/hook": events, "helm.sh/hook-weight": weight, "helm.sh/hook-delete-policy": policies})
		h := ParseHook(object, "a.yaml")
		if len(h.DeletePolicies) == 0 {
			t.Error("a hook without a delete policy")
		}
		for _, event := range h.Events {
			if text := string(event); text == "" || strings.TrimSpace(text) != text || strings.Contains(text, ",") {
				t.Errorf("event %q", text)
			}
			if len(ForEvent([]Hook{h, h}, event)) != 2 {
				t.Errorf("event %q selects not all of its hooks", event)
			}
		}
	})
}

// FuzzRecordMetadata reads the labels and the annotation of records, which anyone with access to Secrets of a member
// can write. The name of an accepted record is that in its labels.
func FuzzRecordMetadata(f *testing.F) {
	f.Add("sh.helm.release.v1.a.v2", "a", "2", "1767225600", "abc 2 true")
	f.Add("sh.helm.release.v1.a.v2", "a", "02", "-9223372036854775808", "abc -1 false")
	f.Add("sh.helm.release.v1..v0", "", "0", "99999999999999999999", "")
	f.Add("sh.helm.release.v1.a.v1", "a", "99999999999999999999", "1e9", "a 99999999999999999999 true")
	f.Add("sh.helm.release.v1.a.v9223372036854775807", "a", "9223372036854775807", "", "")
	f.Add("sh.helm.release.v1.a.v-1", "a", "-1", "", "")
	f.Add("a", "\xff", "-1", "\n", strings.Repeat("a", 20_000)+" 1 true")
	f.Add("sh.helm.release.v1.a.v+1", "a", "+1", "", "a\n1\nt")
	f.Add("sh.helm.release.v1.a.v1", "a", "1", "0", "a 0x10 T and more")
	f.Fuzz(func(t *testing.T, secret, name, version, modified, annotation string) {
		object := metav1.ObjectMeta{Namespace: "eu", Name: secret, Annotations: map[string]string{annotationRendering: annotation}, Labels: map[string]string{
			labelOwner: ownerHelm, labelName: name, labelVersion: version, labelModifiedAt: modified, labelStatus: "deployed",
		}}
		fuzzing.Within(t, 16<<20+uint64(len(secret)+len(annotation))*2000, func() {
			entry, ok := ParseEntry(object)
			if ok && SecretName(name, entry.Revision) != secret {
				t.Errorf("%q was read as revision %d of %q", secret, entry.Revision, entry.Name)
			}
			entry.Modified()
			next := NextRendering([]Entry{entry}, "new", func(metav1.ObjectMeta) bool { return true })
			if ok && (entry.Revision <= 0 || next.Revision <= 0 || next.Inputs != "new") {
				t.Errorf("after revision %d comes %+v", entry.Revision, next)
			}
		})
		rendering, ok := RenderingOf(object)
		if !ok {
			return
		}
		if rendering.Revision <= 0 || rendering.Inputs == "" {
			t.Errorf("%q became %+v", annotation, rendering)
		}
		AnnotateRendering(object.Annotations, rendering)
		if again, ok := RenderingOf(object); !ok || again != rendering {
			t.Errorf("%q became %+v, and that %+v, %t", annotation, rendering, again, ok)
		}
	})
}
