package deliver

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

var testKey = Key("0123456789abcdef0123456789abcdef")

func configMap(name, value string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap",
		"metadata": map[string]any{"namespace": "default", "name": name},
		"data":     map[string]any{"value": value},
	}}
}

// randomText returns about n bytes of text that does not compress well.
func randomText(n int) string {
	raw := make([]byte, n*3/4)
	_, _ = rand.Read(raw)
	return base64.StdEncoding.EncodeToString(raw)
}

func testBundle(items ...bundle.Item) bundle.Bundle {
	return bundle.Bundle{
		ID:      bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "deploy-sveltos-eu-1", Feature: "Resources"},
		Owner:   bundle.Owner{Kind: "ClusterProfile", Name: "deploy", Tier: 100},
		Items:   items,
		Options: bundle.Options{ContinueOnError: true, CorrectDrift: true},
	}
}

// pack encodes b, and returns its group and content like the API server.
func pack(t *testing.T, b bundle.Bundle) (*libv1beta1.ConfigurationGroup, []*libv1beta1.ConfigurationBundle) {
	t.Helper()
	encoder, err := newEncoder(testKey)
	if err != nil {
		t.Fatal(err)
	}
	chunks, err := encoder.encode(b)
	if err != nil {
		t.Fatal(err)
	}
	m := fleet.Member{Namespace: "eu", Name: "eu-1", DeliveryNamespace: "eu", Mode: fleet.Pull}
	var items []libv1beta1.ConfigurationItem
	var bundles []*libv1beta1.ConfigurationBundle
	for _, c := range chunks {
		items = append(items, configurationItem(contentNamespace(m, b, c), c))
		bundles = append(bundles, viaJSON(t, contentObject(m, b.ID, contentNamespace(m, b, c), c)))
	}
	digest, err := b.Digest()
	if err != nil {
		t.Fatal(err)
	}
	group, err := deployGroup(m, b, digest, items)
	if err != nil {
		t.Fatal(err)
	}
	return viaJSON(t, group), bundles
}

func viaJSON[T any](t *testing.T, in *T) *T {
	t.Helper()
	raw, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	out := new(T)
	if err := json.Unmarshal(raw, out); err != nil {
		t.Fatal(err)
	}
	return out
}

func unpack(group *libv1beta1.ConfigurationGroup, bundles []*libv1beta1.ConfigurationBundle) (bundle.Bundle, error) {
	parts := &decoder{}
	for i, obj := range bundles {
		if err := parts.add(group.Spec.ConfigurationItems[i], obj, nil); err != nil {
			return bundle.Bundle{}, err
		}
	}
	return parts.result(group)
}

func TestBundlesRoundTrip(t *testing.T) {
	t.Parallel()
	release := &bundle.Release{
		Name: "kyverno", Namespace: "kyverno", RepoURL: "https://example.com", ChartName: "kyverno", ChartVersion: "3.5.1",
		AppVersion: "v1.15", Icon: "https://example.com/icon.png",
	}
	withData := new(bundle.Release)
	*withData = *release
	withData.Options = bundle.ReleaseOptions{Wait: true, Labels: map[string]string{"team": "a"}}
	withData.Data = bundle.ReleaseData{
		Chart:  json.RawMessage(`{"version":"3.5.1","name":"kyverno","kubeVersion":">=1.25.0-0"}`),
		Values: json.RawMessage(`{"big":9007199254740993,"html":"<a&b>","noise":"` + hex.EncodeToString([]byte(randomText(1<<20))) + `"}`),
		Notes:  "a\n---\nb", Paths: []string{"a.yaml"},
	}
	numbers := configMap("numbers", "")
	numbers.Object["spec"] = map[string]any{
		"int": int64(9007199254740993), "float": 1.5, "whole": float64(3), "huge": 1e300, "html": "<a&b>", "nil": nil,
		"lines": "---\nkind: X\n---\n", "list": []any{}, "empty": map[string]any{},
	}
	var many []*unstructured.Unstructured
	for i := range 3000 {
		many = append(many, configMap(fmt.Sprintf("many-%d", i), randomText(1700)))
	}
	tests := map[string]struct {
		bundle     bundle.Bundle
		minBundles int
		maxBundles int
	}{
		"no items":     {bundle: testBundle(), maxBundles: 0},
		"empty items":  {bundle: func() bundle.Bundle { b := testBundle(); b.Items = []bundle.Item{}; return b }()},
		"no objects":   {bundle: testBundle(bundle.Item{}, bundle.Item{Objects: []*unstructured.Unstructured{}}), minBundles: 2, maxBundles: 2},
		"odd values":   {bundle: testBundle(bundle.Item{Objects: []*unstructured.Unstructured{numbers}}), minBundles: 1, maxBundles: 1},
		"5 MiB of 3k":  {bundle: testBundle(bundle.Item{Objects: many}), minBundles: 8, maxBundles: 16},
		"one of 1.4MB": {bundle: testBundle(bundle.Item{Objects: []*unstructured.Unstructured{configMap("a", "1"), configMap("big", randomText(1400<<10)), configMap("z", "1")}}), minBundles: 3, maxBundles: 6},
		"one of 20 MB of zeros": {
			bundle:     testBundle(bundle.Item{Objects: []*unstructured.Unstructured{configMap("big", strings.Repeat("x", 20<<20))}}),
			minBundles: 3, maxBundles: 4,
		},
		"everything set": {
			bundle: testBundle(
				bundle.Item{
					Objects:   []*unstructured.Unstructured{configMap("a", "1"), configMap("b", "2")},
					Reference: bundle.Reference{Kind: "ConfigMap", Namespace: "default", Name: "source", Tier: 50}, SkipNamespaceCreation: true,
				},
				bundle.Item{Objects: []*unstructured.Unstructured{configMap("c", "3")}, Release: release, Sensitive: true, Force: true},
				bundle.Item{Objects: []*unstructured.Unstructured{configMap("d", "4")}, Release: release},
			),
			minBundles: 3, maxBundles: 3,
		},
		"release data": {
			bundle: testBundle(
				bundle.Item{Objects: []*unstructured.Unstructured{configMap("a", "1")}, Release: withData},
				bundle.Item{Release: withData},
				bundle.Item{Objects: []*unstructured.Unstructured{}, Release: withData},
			),
			minBundles: 6, maxBundles: 12,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			group, bundles := pack(t, tc.bundle)
			if len(bundles) < tc.minBundles || len(bundles) > tc.maxBundles {
				t.Errorf("bundles: got %d, want %d to %d", len(bundles), tc.minBundles, tc.maxBundles)
			}
			for _, obj := range bundles {
				if raw, _ := json.Marshal(obj); len(raw) > 1<<20 {
					t.Errorf("bundle %s takes %d bytes", obj.Name, len(raw))
				}
			}
			got, err := unpack(group, bundles)
			if err != nil {
				t.Fatal(err)
			}
			gotDigest, _ := got.Digest()
			wantDigest, _ := tc.bundle.Digest()
			if gotDigest != wantDigest {
				t.Errorf("digest: got %s, want %s; (-want +got):\n%.2000s", gotDigest, wantDigest, cmp.Diff(tc.bundle, got))
			}
		})
	}
}

func TestNamesComeFromContentAndKey(t *testing.T) {
	t.Parallel()
	item := bundle.Item{Objects: []*unstructured.Unstructured{configMap("a", "1")}}
	_, first := pack(t, testBundle(item))
	other := testBundle(item)
	other.ID.RequestorName, other.Owner.Name = "another", "another"
	_, second := pack(t, other)
	if first[0].Name != second[0].Name {
		t.Errorf("names of equal content: got %s and %s, want the same name", first[0].Name, second[0].Name)
	}
	item.Force = true
	_, third := pack(t, testBundle(item))
	if first[0].Name == third[0].Name {
		t.Error("names of content with different flags: got the same name")
	}
	if name := Key("other").contentName([]byte("x")); name == testKey.contentName([]byte("x")) || len(name) != len("config-")+20 {
		t.Errorf("name with another key: %s", name)
	}
	a := fleet.Member{DeliveryNamespace: "eu", Name: "a"}
	b := fleet.Member{DeliveryNamespace: "eu", Name: "b"}
	if id := other.ID; GroupName(a, id) == GroupName(b, id) {
		t.Error("group names of two members: got the same name")
	}
}

func TestFieldsOfSveltosAreSet(t *testing.T) {
	t.Parallel()
	_, bundles := pack(t, testBundle(bundle.Item{
		Objects: []*unstructured.Unstructured{configMap("a", "1")}, Reference: bundle.Reference{Kind: "ConfigMap", Namespace: "ns", Name: "n", Tier: 3},
		Release: &bundle.Release{Name: "r", Namespace: "rns", ChartVersion: "1.0.0", RepoURL: "u", Icon: "i"}, Force: true,
	}))
	got := bundles[0].Spec
	got.Payload = nil
	want := libv1beta1.ConfigurationBundleSpec{
		HelmReleaseNamespace: "rns", HelmReleaseName: "r", HelmChartVersion: "1.0.0", HelmIcon: "i", HelmRepoURL: "u", IsLastHelmReleaseBundle: true,
		ReferencedObjectKind: "ConfigMap", ReferencedObjectNamespace: "ns", ReferencedObjectName: "n", ReferenceTier: 3, Force: true,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
}

func TestCorruptContentIsAnError(t *testing.T) {
	t.Parallel()
	var objects []*unstructured.Unstructured
	for i := range 50 {
		objects = append(objects, configMap(fmt.Sprintf("n-%d", i), randomText(30<<10)))
	}
	group, bundles := pack(t, testBundle(bundle.Item{Objects: objects}, bundle.Item{Objects: objects[:1]}))
	if len(bundles) < 4 {
		t.Fatalf("got %d bundles, want at least 4", len(bundles))
	}
	tests := map[string]func(g *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle){
		"no payload": func(_ *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle) { b[0].Spec.Payload = nil },
		"cut payload": func(_ *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle) {
			b[0].Spec.Payload = b[0].Spec.Payload[:100]
		},
		"other header": func(_ *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle) {
			b[0].Annotations[annotationHeader] += " "
		},
		"swapped": func(_ *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle) { b[0], b[1] = b[1], b[0] },
		"starts inside": func(g *libv1beta1.ConfigurationGroup, b []*libv1beta1.ConfigurationBundle) {
			g.Spec.ConfigurationItems[0].Hash = g.Spec.ConfigurationItems[1].Hash
			b[0] = b[1]
		},
		"no hash": func(g *libv1beta1.ConfigurationGroup, _ []*libv1beta1.ConfigurationBundle) {
			g.Spec.ConfigurationItems[0].Hash = nil
		},
		"other digest": func(g *libv1beta1.ConfigurationGroup, _ []*libv1beta1.ConfigurationBundle) { g.Spec.RequestorHash[0]++ },
		"other owner": func(g *libv1beta1.ConfigurationGroup, _ []*libv1beta1.ConfigurationBundle) {
			g.Annotations[annotationOutline] = `{"id":{},"owner":{"tier":1}}`
		},
		"outline is noise": func(g *libv1beta1.ConfigurationGroup, _ []*libv1beta1.ConfigurationBundle) {
			g.Annotations[annotationOutline] = "}"
		},
	}
	for name, corrupt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := group.DeepCopy()
			var copies []*libv1beta1.ConfigurationBundle
			for _, b := range bundles {
				copies = append(copies, b.DeepCopy())
			}
			corrupt(g, copies)
			if _, err := unpack(g, copies); !errors.Is(err, ErrCorrupt) {
				t.Errorf("got error %v, want %v", err, ErrCorrupt)
			}
		})
	}
}

func TestRandomPayloadsAreCorrupt(t *testing.T) {
	t.Parallel()
	group, bundles := pack(t, testBundle(bundle.Item{Objects: []*unstructured.Unstructured{configMap("a", strings.Repeat("abc", 1000))}}))
	random := mathrand.New(mathrand.NewPCG(1, 2))
	for range 3000 {
		spoiled := bundles[0].DeepCopy()
		for range 1 + random.IntN(4) {
			spoiled.Spec.Payload[random.IntN(len(spoiled.Spec.Payload))] ^= byte(1 + random.IntN(255))
		}
		b, err := unpack(group, []*libv1beta1.ConfigurationBundle{spoiled})
		if err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("got error %v, want %v", err, ErrCorrupt)
		}
		if err == nil && len(b.Items) != 1 {
			t.Fatal("other content was accepted")
		}
	}
	for range 3000 {
		stream := make([]byte, random.IntN(200))
		for i := range stream {
			stream[i] = "{}[]:\"\n-ak ,\\x00&*1"[random.IntN(19)]
		}
		if _, err := parseStream(stream); err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("parse %q: got error %v, want %v", stream, err, ErrCorrupt)
		}
	}
}

func TestDecompressionIsBounded(t *testing.T) {
	t.Parallel()
	encoder, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	zeros := encoder.EncodeAll(make([]byte, 2*maxStream), nil)
	half := encoder.EncodeAll(make([]byte, maxStream/2), nil)
	var streamed bytes.Buffer
	writer, err := zstd.NewWriter(&streamed)
	if err != nil {
		t.Fatal(err)
	}
	for range 64 {
		_, _ = writer.Write(make([]byte, maxStream/8))
	}
	if err := writer.Close(); err != nil {
		t.Fatal(err)
	}
	tests := map[string][]byte{
		"one frame":           zeros,
		"many frames":         bytes.Repeat(half, 20),
		"frame without size":  streamed.Bytes(),
		"payload far too big": make([]byte, 4<<20),
	}
	for name, payload := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := decompress(payload); !errors.Is(err, ErrCorrupt) {
				t.Errorf("got error %v, want %v", err, ErrCorrupt)
			}
		})
	}
}

func TestEncoderCompressesManyContentsOnce(t *testing.T) {
	t.Parallel()
	encoder, err := newEncoder(testKey)
	if err != nil {
		t.Fatal(err)
	}
	encode := func(i int) chunk {
		t.Helper()
		chunks, err := encoder.encode(testBundle(bundle.Item{Objects: []*unstructured.Unstructured{configMap("a", fmt.Sprint(i))}}))
		if err != nil || len(chunks) != 1 {
			t.Fatalf("got %d chunks, error %v", len(chunks), err)
		}
		return chunks[0]
	}
	first := map[int]chunk{}
	for i := range 200 {
		first[i] = encode(i)
	}
	for i := range 200 {
		if again := encode(i); &again.payload[0] != &first[i].payload[0] {
			t.Fatalf("content %d was compressed again", i)
		}
	}
}

func TestEncodeRefusesInvalidObjects(t *testing.T) {
	t.Parallel()
	for name, obj := range map[string]*unstructured.Unstructured{
		"nil":        nil,
		"no kind":    {Object: map[string]any{"apiVersion": "v1"}},
		"no version": {Object: map[string]any{"kind": "ConfigMap"}},
		"a channel":  {Object: map[string]any{"apiVersion": "v1", "kind": "X", "c": make(chan int)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			encoder, err := newEncoder(testKey)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := encoder.encode(testBundle(bundle.Item{Objects: []*unstructured.Unstructured{obj}})); err == nil {
				t.Error("got no error")
			}
		})
	}
}

func TestResourcesOfASveltosHub(t *testing.T) {
	t.Parallel()
	const yamlDoc = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n  namespace: default\ndata:\n  value: \"1\"\n"
	objects := []*unstructured.Unstructured{configMap("a", "1")}
	lines, _ := objects[0].MarshalJSON()
	plain, _ := json.Marshal(objects[0])
	group := &libv1beta1.ConfigurationGroup{}
	group.Labels = map[string]string{libv1beta1.PullRequestorKindLabel: "ClusterSummary", libv1beta1.PullRequestorFeatureLabel: "Helm"}
	group.Annotations = map[string]string{libv1beta1.PullRequestorNameAnnotation: "s"}
	group.Spec.Tier = 7
	group.Spec.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/spec/replicas"}}}
	obj := &libv1beta1.ConfigurationBundle{Spec: libv1beta1.ConfigurationBundleSpec{
		Resources: []string{yamlDoc, ""}, HelmReleaseName: "r", HelmReleaseNamespace: "rns", Force: true,
	}}
	want := bundle.Bundle{
		ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "s", Feature: "Helm"}, Owner: bundle.Owner{Kind: "ClusterSummary", Name: "s", Tier: 7},
		Items:   []bundle.Item{{Objects: objects, Sensitive: true, Force: true, Release: &bundle.Release{Name: "r", Namespace: "rns"}}},
		Options: bundle.Options{DriftExclusions: group.Spec.DriftExclusions},
	}
	for name, tc := range map[string]struct {
		hash    []byte
		wantErr error
	}{
		"no hash":            {},
		"hash of lines":      {hash: sum(lines)},
		"hash of plain JSON": {hash: sum(plain)},
		"other hash":         {hash: sum(nil), wantErr: ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := group.DeepCopy()
			g.Spec.ConfigurationItems = []libv1beta1.ConfigurationItem{{Hash: tc.hash}}
			got, err := unpack(g, []*libv1beta1.ConfigurationBundle{obj})
			if !errors.Is(err, tc.wantErr) {
				t.Fatalf("got error %v, want %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(want, got); err == nil && diff != "" {
				t.Errorf("bundle (-want +got):\n%s", diff)
			}
		})
	}
}
