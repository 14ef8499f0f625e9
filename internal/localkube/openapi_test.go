package localkube_test

import (
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/openapi3"

	"github.com/towline/towline/internal/localkube"
)

// The documents are built when they are asked for. Documents of built-in kinds, of the aggregator and of
// CustomResourceDefinitions come from three servers.
func TestOpenAPI(t *testing.T) {
	t.Parallel()
	client := clientOf(localkube.Shared(t)).Discovery()
	root := openapi3.NewRoot(client.OpenAPIV3())
	kinds := map[schema.GroupVersion]string{
		{Version: "v1"}:                                  "Pod",
		{Group: "apps", Version: "v1"}:                   "Deployment",
		{Group: "apiregistration.k8s.io", Version: "v1"}: "APIService",
		{Group: "apiextensions.k8s.io", Version: "v1"}:   "CustomResourceDefinition",
	}
	for groupVersion, kind := range kinds {
		// Twice: the document is kept.
		for range 2 {
			document, err := root.GVSpec(groupVersion)
			if err != nil {
				t.Fatalf("%s: %v", groupVersion, err)
			}
			found := false
			for name, described := range document.Components.Schemas {
				found = found || strings.HasSuffix(name, "."+kind) && len(described.Properties) > 0
			}
			if !found {
				t.Errorf("%s does not describe the kind %s", groupVersion, kind)
			}
		}
	}
	paths, err := client.OpenAPIV3().Paths()
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) < 30 || paths["apis/apps/v1"] == nil {
		t.Errorf("the list has %d documents, want one for each group and version", len(paths))
	}
	err = client.RESTClient().Get().AbsPath("/openapi/v3/apis/none.example.com/v1").Do(t.Context()).Error()
	if !apierrors.IsNotFound(err) {
		t.Errorf("a document of no group: %v, want not found", err)
	}
}
