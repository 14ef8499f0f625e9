package engine

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestStringDataBecomesData(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ secret, want map[string]any }{
		"added to data": {
			secret: map[string]any{"data": map[string]any{"a": "MQ=="}, "stringData": map[string]any{"b": "2"}},
			want:   map[string]any{"data": map[string]any{"a": "MQ==", "b": "Mg=="}},
		},
		"replaces data": {
			secret: map[string]any{"data": map[string]any{"a": "MQ=="}, "stringData": map[string]any{"a": "2"}},
			want:   map[string]any{"data": map[string]any{"a": "Mg=="}},
		},
		"null":          {secret: map[string]any{"stringData": nil}, want: map[string]any{}},
		"null in a key": {secret: map[string]any{"stringData": map[string]any{"a": nil}}, want: map[string]any{"data": map[string]any{"a": ""}}},
	} {
		if err := convertStringData(test.secret); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(test.want, test.secret); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for name, value := range map[string]any{"a text": "text", "a number in a key": map[string]any{"port": int64(80)}} {
		if err := convertStringData(map[string]any{"stringData": value}); err == nil {
			t.Errorf("%s: got no error", name)
		}
	}
}
