package render_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/render"
)

// TestSchemaLoadsNoOtherDocuments renders charts whose values.schema.json refers to a server or a file.
func TestSchemaLoadsNoOtherDocuments(t *testing.T) {
	t.Parallel()
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		_, _ = w.Write([]byte("true"))
	}))
	t.Cleanup(server.Close)
	file := filepath.Join(t.TempDir(), "schema.json")
	if err := os.WriteFile(file, []byte("true"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct{ schema, want string }{
		"server":          {`{"$ref":"` + server.URL + `/a.json"}`, server.URL},
		"relative":        {`{"$id":"` + server.URL + `/a.json","properties":{"a":{"$ref":"b.json"}}}`, server.URL},
		"metaschema":      {`{"$schema":"` + server.URL + `/meta"}`, server.URL},
		"file":            {`{"$ref":"file://` + file + `"}`, file},
		"invalid pattern": {`{"properties":{"a":{"pattern":"("},"b":{"$ref":"` + server.URL + `"}}}`, "values.schema.json"},
		"own definition":  {`{"$schema":"http://json-schema.org/draft-07/schema#","definitions":{"a":{"type":"string"}},"properties":{"a":{"$ref":"#/definitions/a"}}}`, ""},
		"URN":             {`{"properties":{"a":{"$ref":"urn:example:a"}}}`, ""},
	} {
		chartRequest := request(t, examples.Chart{Files: map[string]string{"values.schema.json": test.schema}})
		_, err := render.NewCharts(nil).Render(t.Context(), chartRequest)
		if (err != nil) != (test.want != "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
		chartRequest.SkipSchemaValidation = true
		if _, err := render.NewCharts(nil).Render(t.Context(), chartRequest); err != nil {
			t.Errorf("%s, without the schema: %v", name, err)
		}
	}
	if n := requests.Load(); n > 0 {
		t.Errorf("the server got %d requests", n)
	}
}
