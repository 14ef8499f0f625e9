package fleet_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
)

// TestResponsesOfMembersAreLimited reads a response without end.
func TestResponsesOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	zeros := make([]byte, 1<<20)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(zeros); err != nil {
				return
			}
		}
	}))
	t.Cleanup(server.Close)
	config := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: []byte(authorityOf(server))}}
	if err := fleet.NewClients(nil, nil, fleet.IdentityPolicy{}, nil).LimitConnections(config); err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/version", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if read, err := io.Copy(io.Discard, response.Body); err == nil || !strings.Contains(err.Error(), "the cluster returned more than 256 MiB") {
		t.Errorf("read %d bytes, error %v", read, err)
	}
}
