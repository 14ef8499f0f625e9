package kube_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/kube"
)

func TestDecodeManifest(t *testing.T) {
	t.Parallel()
	const configMap = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: "
	const tooLarge = "aliases make it too large"
	longAnchor := "x: &a " + strings.Repeat("x", 50<<10) + "\n"
	for name, test := range map[string]struct {
		text    string
		want    []string
		wantErr string
	}{
		"nothing": {text: ""},
		"too many objects": {
			text:    `{"apiVersion":"v1","kind":"List","items":[` + strings.Repeat(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}},`, kube.MaxObjects) + `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"b"}}]}`,
			wantErr: "document 1, line 1: there are more than 20000 objects",
		},
		"a long document":            {text: configMap + "a\n---\n" + configMap + strings.Repeat("b", 4<<20), wantErr: "document 2, line 6: it has more than 4 MiB"},
		"a document of many values":  {text: configMap + "a\ndata: [" + strings.Repeat("{},", 600_000) + "]\n", wantErr: "document 1, line 1: it has more than 1000000 values"},
		"documents of many values":   {text: strings.Repeat(configMap+"a\ndata: ["+strings.Repeat("{},", 400_000)+"]\n---\n", 4), wantErr: "it has more than 3000000 values"},
		"a long text in a ConfigMap": {text: configMap + "a\ndata: {a: \"" + strings.Repeat("1,", 1<<19) + "\"}\n", want: []string{"ConfigMap a"}},
		"aliases of a long text":     {text: configMap + "a\n---\n" + configMap + "b\n" + longAnchor + "y: [" + strings.Repeat("*a, ", 2000) + "]\n", wantErr: "document 2, line 6: " + tooLarge},
		"aliases as keys":            {text: configMap + "a\n" + longAnchor + "y: [" + strings.Repeat("{*a : 1}, ", 2000) + "]\n", wantErr: "document 1, line 1: " + tooLarge},
		"aliases in merge keys":      {text: configMap + "a\nx: &a {k: " + strings.Repeat("x", 50<<10) + "}\ny: [" + strings.Repeat("{<<: *a}, ", 2000) + "]\n", wantErr: "document 1, line 1: " + tooLarge},
		"aliases of aliases":         {text: configMap + "a\n" + longAnchor + "y: &b [" + strings.Repeat("*a, ", 40) + "]\nz: [" + strings.Repeat("*b, ", 40) + "]\n", wantErr: "document 1, line 1: " + tooLarge},
		"aliases of a binary text":   {text: configMap + "a\nx: &a !!binary " + strings.Repeat("aaaa", 13<<10) + "\ny: [" + strings.Repeat("*a, ", 2000) + "]\n", wantErr: "document 1, line 1: " + tooLarge},
		"aliases of many values":     {text: configMap + "a\nx: &a [" + strings.Repeat("{},", 1000) + "]\ny: [" + strings.Repeat("*a, ", 300) + "]\n", wantErr: "document 1, line 1: " + tooLarge},
		"aliases in UTF-16":          {text: utf16(configMap + "a\n" + longAnchor + "y: [" + strings.Repeat("*a, ", 2000) + "]\n"), wantErr: "document 1, line 1: " + tooLarge},
		"aliases of itself":          {text: configMap + "a\nx: &a [*a, *a]\n", wantErr: "document 1, line 1: "},
		"documents of aliases": {
			text:    strings.Repeat(configMap+"a\n"+longAnchor+"y: ["+strings.Repeat("*a, ", 15)+"]\n---\n", 6),
			wantErr: "document 4, line 22: " + tooLarge,
		},
		"usual aliases": {
			text: configMap + "a\nx-env: &env {A: b}\ny: [&t text, *t]\nservices:\n" + strings.Repeat("- environment: {<<: *env, C: *t}\n", 1000),
			want: []string{"ConfigMap a"},
		},
		"text that has no aliases": {text: configMap + "a\ndata:\n  a: |\n    int f(int &a) { return *a; }\n", want: []string{"ConfigMap a"}},
		"a merge of no map":        {text: configMap + "a\nx: &a text\ny: {<<: *a}\n", wantErr: "document 1, line 1: map merge requires map"},
		"only comments":            {text: "# a\n---\n# b\n---\n"},
		"two documents":            {text: configMap + "a\n---\n" + configMap + "b\n", want: []string{"ConfigMap a", "ConfigMap b"}},
		"leading separator":        {text: "---\n" + configMap + "a\n", want: []string{"ConfigMap a"}},
		"json":                     {text: `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","namespace":"eu"}}`, want: []string{"Deployment apps eu/web"}},
		"list":                     {text: `{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}]}`, want: []string{"Secret a"}},
		"empty list":               {text: "apiVersion: v1\nkind: List\nitems: []\n"},
		"broken yaml":              {text: configMap + "a\n---\n" + "kind: [", wantErr: "document 2, line 6: "},
		"no kind":                  {text: configMap + "a\n---\n" + configMap + "b\n---\napiVersion: v1\n", wantErr: "document 3, line 11: it has no kind"},
		"no apiVersion":            {text: "kind: ConfigMap\nmetadata: {name: a}\n", wantErr: "document 1, line 1: it has no apiVersion"},
		"no name":                  {text: "apiVersion: v1\nkind: ConfigMap\n", wantErr: "document 1, line 1: it has no metadata.name"},
		"a scalar":                 {text: "hello\n", wantErr: "document 1, line 1: it is not an object with fields"},
		"a list item nameless":     {text: `{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Secret"}]}`, wantErr: "document 1, line 1: items[0]: it has no metadata.name"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			objects, err := kube.DecodeManifest([]byte(test.text))
			if test.wantErr != "" {
				if err == nil || !strings.HasPrefix(err.Error(), test.wantErr) {
					t.Fatalf("got error %v, want %q", err, test.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, obj := range objects {
				got = append(got, kube.RefOf(obj).String())
			}
			if diff := cmp.Diff(got, test.want); diff != "" {
				t.Errorf("objects (-got +want):\n%s", diff)
			}
		})
	}
}

// utf16 returns ASCII text in UTF-16.
func utf16(text string) string {
	encoded := []byte("\xff\xfe")
	for _, char := range []byte(text) {
		encoded = append(encoded, char, 0)
	}
	return string(encoded)
}

// Other decoders read the first document of a text as a whole, with its directives, or all of its documents.
func TestCountValuesOfAliases(t *testing.T) {
	t.Parallel()
	aliases := "x: &a " + strings.Repeat("x", 50<<10) + "\ny: [" + strings.Repeat("*a, ", 2000) + "]\n"
	for name, text := range map[string]string{
		"the first document":          aliases + "---\na: 1\n",
		"another document":            "a: 1\n---\n" + aliases,
		"after a comment":             "# a\n--- # b\n" + aliases,
		"with a directive":            "%TAG !e! a:\n--- # b\nz: !e!a b\n" + aliases,
		"with a directive of another": "a: 1\n---\n%TAG !e! a:\n--- # b\nz: !e!a b\n" + aliases,
		"in UTF-16":                   utf16("# a\n--- # b\n" + aliases),
	} {
		if got := kube.CountValues([]byte(text)); got <= 3_000_000 {
			t.Errorf("%s: got %d, want more than all limits", name, got)
		}
	}
	for name, text := range map[string]string{"no aliases": "a: '&b *c'\n", "few aliases": "a: &b text\nc: [*b, *b]\n"} {
		if got := kube.CountValues([]byte(text)); got > 100 {
			t.Errorf("%s: got %d, want about the number of values", name, got)
		}
	}
}
