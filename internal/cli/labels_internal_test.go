package cli

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/test/fuzzing"
)

func TestParseLabels(t *testing.T) {
	t.Parallel()
	blanks := " a = b ,c=d"
	for text, want := range map[string]map[string]string{
		"":                   {},
		"a=b":                {"a": "b"},
		blanks:               {"a": "b", "c": "d"},
		"environment=,tier=": {"environment": "", "tier": ""},
	} {
		got, err := parseLabels(text)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%q: got error %v and (-want +got):\n%s", text, err, diff)
		}
	}
	for _, text := range []string{"a", "a=b=c", "a=b,", "=b"} {
		if _, err := parseLabels(text); err == nil || !strings.Contains(err.Error(), "invalid key-value pair format: ") {
			t.Errorf("%q: got error %v", text, err)
		}
	}
}

// FuzzParseLabels reads the labels of a command line.
func FuzzParseLabels(f *testing.F) {
	f.Add("a=b, c = d")
	f.Add("a==b")
	f.Add(",")
	f.Fuzz(func(t *testing.T, text string) {
		labels, err := parseLabels(text)
		if err != nil {
			return
		}
		var pairs []string
		for key, value := range labels {
			if key == "" {
				t.Errorf("%q has a label without a key", text)
			}
			pairs = append(pairs, key+"="+value)
		}
		again, err := parseLabels(strings.Join(pairs, ","))
		if err != nil || !cmp.Equal(labels, again, cmpopts.EquateEmpty()) {
			t.Errorf("%q became %v, and that %v, %v", text, labels, again, err)
		}
		request := join.Request{Namespace: "a", Name: "b", Labels: labels}
		err = request.Validate()
		fuzzing.OneLine(t, err)
		for key, value := range labels {
			if problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); err == nil && len(problems) > 0 {
				t.Errorf("label %q=%q is accepted: %s", key, value, problems)
			}
		}
	})
}
