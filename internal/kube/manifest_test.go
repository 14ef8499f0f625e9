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
		"only comments":              {text: "# a\n---\n# b\n---\n"},
		"two documents":              {text: configMap + "a\n---\n" + configMap + "b\n", want: []string{"ConfigMap a", "ConfigMap b"}},
		"leading separator":          {text: "---\n" + configMap + "a\n", want: []string{"ConfigMap a"}},
		"json":                       {text: `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"web","namespace":"eu"}}`, want: []string{"Deployment apps eu/web"}},
		"list":                       {text: `{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}]}`, want: []string{"Secret a"}},
		"empty list":                 {text: "apiVersion: v1\nkind: List\nitems: []\n"},
		"broken yaml":                {text: configMap + "a\n---\n" + "kind: [", wantErr: "document 2, line 6: "},
		"no kind":                    {text: configMap + "a\n---\n" + configMap + "b\n---\napiVersion: v1\n", wantErr: "document 3, line 11: it has no kind"},
		"no apiVersion":              {text: "kind: ConfigMap\nmetadata: {name: a}\n", wantErr: "document 1, line 1: it has no apiVersion"},
		"no name":                    {text: "apiVersion: v1\nkind: ConfigMap\n", wantErr: "document 1, line 1: it has no metadata.name"},
		"a scalar":                   {text: "hello\n", wantErr: "document 1, line 1: it is not an object with fields"},
		"a list item nameless":       {text: `{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"v1","kind":"Secret"}]}`, wantErr: "document 1, line 1: items[0]: it has no metadata.name"},
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
