package fleet_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// TestProbeLimitsText probes a cluster with long names. Callers keep the facts of each cluster, so the facts need a
// limit.
func TestProbeLimitsText(t *testing.T) {
	t.Parallel()
	group := strings.Repeat("g", 250)
	probe := func(kinds int) (fleet.Facts, error) {
		resources := make([]string, kinds)
		for i := range resources {
			resources[i] = fmt.Sprintf(`{"name":"k%d","kind":"K%060d"}`, i, i)
		}
		replies := map[string]string{
			"/version":               `{"gitVersion":"v1.34.0"}`,
			"/api":                   `{"kind":"APIVersions","versions":[]}`,
			"/apis":                  `{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"` + group + `","versions":[{"groupVersion":"` + group + `/v1","version":"v1"}]}]}`,
			"/apis/" + group + "/v1": `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"` + group + `/v1","resources":[` + strings.Join(resources, ",") + `]}`,
		}
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprint(w, replies[r.URL.Path]) // the client may have closed the connection
		}))
		defer server.Close()
		return fleet.Probe(t.Context(), &rest.Config{Host: server.URL})
	}
	facts, err := probe(3000)
	if err != nil {
		t.Fatal(err)
	}
	text := 0
	for _, api := range facts.APIVersions {
		text += len(api)
	}
	if len(facts.APIVersions) != 3001 || text > kube.MaxAPIText {
		t.Errorf("got %d APIs with %d bytes", len(facts.APIVersions), text)
	}
	const want = "read the APIs: the cluster serves more than 20000 API versions and resources, or their names have more than 1 MiB"
	if facts, err = probe(4000); err == nil || err.Error() != want {
		t.Errorf("got %d APIs and error %v, want %q", len(facts.APIVersions), err, want)
	}
}

// TestOrdinaryMembersAreReadAtOnce probes the members of one namespace concurrently, like the hub after its start, with
// the memory for responses of a hub with 2 GiB. Each member has 300 APIs.
func TestOrdinaryMembersAreReadAtOnce(t *testing.T) {
	t.Parallel()
	const members, workers, kinds = 1000, 80, 300
	var resources []string
	for i := range kinds {
		resources = append(resources, fmt.Sprintf(`{"resource":"samples%d","responseKind":{"group":"example.com","version":"v1","kind":"Sample%d"},"scope":"Namespaced",`+
			`"singularResource":"sample%d","verbs":["delete","deletecollection","get","list","patch","create","update","watch"],"shortNames":["s"],"categories":["all"],`+
			`"subresources":[{"subresource":"status","responseKind":{"group":"example.com","version":"v1","kind":"Sample%d"},"verbs":["get","patch","update"]}]}`, i, i, i, i))
	}
	apis := `{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{"metadata":{"name":"example.com"},"versions":[{"version":"v1","resources":[` +
		strings.Join(resources, ",") + `]}]}]}`
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
		switch r.URL.Path {
		case "/version":
			w.Header().Set("Content-Type", "application/json")
			_, _ = fmt.Fprint(w, `{"gitVersion":"v1.34.0"}`) // here and below the client may have closed the connection
		case "/api":
			_, _ = fmt.Fprint(w, `{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[]}`)
		default:
			_, _ = fmt.Fprint(w, apis)
		}
	}))
	t.Cleanup(server.Close)
	config := limitedConfigWith(t, server, kube.NewResponseMemory(512<<20))
	var group errgroup.Group
	group.SetLimit(workers)
	for range members {
		group.Go(func() error {
			facts, err := fleet.Probe(t.Context(), config)
			if err == nil && len(facts.APIVersions) != kinds+1 {
				err = fmt.Errorf("got %d APIs", len(facts.APIVersions))
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
}
