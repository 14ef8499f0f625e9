package release

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	helm "helm.sh/helm/v4/pkg/release/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// incompressible returns text that no compressor makes shorter than three quarters of its length.
func incompressible(length int) string {
	random := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	for range length {
		text.WriteByte(byte('0' + random.IntN(64)))
	}
	return text.String()
}

// TestRecordsFitIntoASecret checks that a record that is too large for a Secret loses the chart's templates and files
// first and then the manifest, and that it is refused if that is not enough.
func TestRecordsFitIntoASecret(t *testing.T) {
	t.Parallel()
	large := incompressible(2 << 20)
	withTemplates := &chart.Chart{
		Metadata: &chart.Metadata{Name: "web"}, Values: map[string]any{"replicas": 1.0},
		Templates: []*common.File{{Name: "templates/a.yaml", Data: []byte(large)}},
	}
	for name, test := range map[string]struct {
		record                 helm.Release
		wantManifest, wantGone bool
	}{
		"small":                  {record: helm.Release{Chart: &chart.Chart{Metadata: &chart.Metadata{Name: "web"}}, Manifest: "a: b"}, wantManifest: true},
		"large templates":        {record: helm.Release{Chart: withTemplates, Manifest: "a: b"}, wantManifest: true},
		"large manifest":         {record: helm.Release{Chart: withTemplates, Manifest: large}},
		"manifest, no chart":     {record: helm.Release{Manifest: large}},
		"nothing can be omitted": {record: helm.Release{Config: map[string]any{"large": large}}, wantGone: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			encoded, err := encode(&test.record)
			if test.wantGone {
				if !errors.Is(err, ErrTooLarge) {
					t.Errorf("got %v, want ErrTooLarge", err)
				}
				return
			}
			if err != nil || len(encoded) > 1<<20 {
				t.Fatalf("%d bytes, %v", len(encoded), err)
			}
			record, err := decode(t.Context(), encoded, nil)
			if err != nil {
				t.Fatal(err)
			}
			if HasManifest(record.Release) != test.wantManifest || test.wantManifest && record.Manifest != test.record.Manifest {
				t.Errorf("manifest: got %.80q", record.Manifest)
			}
			if test.record.Chart != nil && (record.Chart.Metadata.Name != "web" || len(record.Chart.Templates) > 0) {
				t.Errorf("chart: got %+v", record.Chart)
			}
			if test.record.Chart == withTemplates && test.wantManifest && record.Chart.Values["replicas"] != 1.0 {
				t.Errorf("default values: got %v", record.Chart.Values)
			}
		})
	}
}

// TestDecodeIsBounded decodes a record that decompresses to more than any record has.
func TestDecodeIsBounded(t *testing.T) {
	t.Parallel()
	encoded, err := encodeUnlimited(&helm.Release{Manifest: strings.Repeat("a", maxDecodedBytes)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decode(t.Context(), encoded, nil); !errors.Is(err, errInvalid) || !strings.HasSuffix(err.Error(), "it has more than 32 MiB") {
		t.Errorf("got %v from %d bytes", err, len(encoded))
	}
}

// TestRecordOfAnotherReleaseIsRefused reads Secrets whose record claims another namespace, release or revision.
func TestRecordOfAnotherReleaseIsRefused(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		record helm.Release
		wantOK bool
	}{
		"its own":           {helm.Release{Name: "web", Namespace: "site", Version: 2, Info: &helm.Info{}}, true},
		"another namespace": {helm.Release{Name: "web", Namespace: "kube-system", Version: 2, Info: &helm.Info{}}, false},
		"another release":   {helm.Release{Name: "dns", Namespace: "site", Version: 2, Info: &helm.Info{}}, false},
		"another revision":  {helm.Release{Name: "web", Namespace: "site", Version: 1, Info: &helm.Info{}}, false},
		"no info":           {helm.Release{Name: "web", Namespace: "site", Version: 2}, false},
	} {
		encoded, err := encode(&test.record)
		if err != nil {
			t.Fatal(err)
		}
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "site", Name: "sh.helm.release.v1.web.v2"}, Data: map[string][]byte{dataKey: encoded}}
		if _, ok, err := decodeSecret(t.Context(), secret, Key{"site", "web"}, 2, nil); ok != test.wantOK || err != nil {
			t.Errorf("%s: got %t, error %v", name, ok, err)
		}
	}
}
