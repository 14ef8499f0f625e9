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
	response := get(t, server, "/version", "")
	defer response.Body.Close()
	if read, err := io.Copy(io.Discard, response.Body); err == nil || !strings.Contains(err.Error(), "the cluster returned more than 256 MiB") {
		t.Errorf("read %d bytes, error %v", read, err)
	}
}

// TestMembersReturnNoProtobuf: the limit of values is one of JSON.
func TestMembersReturnNoProtobuf(t *testing.T) {
	t.Parallel()
	const protobuf = "application/vnd.kubernetes.protobuf"
	var accepted string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		accepted = r.Header.Get("Accept")
		_, _ = io.WriteString(w, "k8s\x00\x12\x00") // the client may have gone
	}))
	t.Cleanup(server.Close)
	for accept, want := range map[string]string{
		protobuf: "application/json",
		protobuf + ";as=Table,application/json;as=Table,application/json": "application/json;as=Table,application/json",
		"application/yaml": "application/yaml",
	} {
		response := get(t, server, "/version", accept)
		if accepted != want {
			t.Errorf("Accept: %s is sent as %s, want %s", accept, accepted, want)
		}
		if body, err := io.ReadAll(response.Body); len(body) > 0 || err == nil || !strings.Contains(err.Error(), "Protobuf, which was not requested") {
			t.Errorf("the body is %q, error %v", body, err)
		}
		response.Body.Close()
	}
}

// TestObjectsOfMembersAreJSON: a text with an object in it is another object if it is decoded as YAML.
func TestObjectsOfMembersAreJSON(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = io.WriteString(w, "text: |\n  {\"kind\":\"A\",\"apiVersion\":\"v1\"}\n")
	}))
	t.Cleanup(server.Close)
	response := get(t, server, "/api/v1/pods", "")
	defer response.Body.Close()
	if got, want := response.Header.Get("Content-Type"), "application/json"; got != want {
		t.Errorf("the response is %s, want %s", got, want)
	}
}

// get sends a request to server as to a member.
func get(t *testing.T, server *httptest.Server, path, accept string) *http.Response {
	t.Helper()
	config := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: []byte(authorityOf(server))}}
	if err := fleet.NewClients(fleet.SecretReaders{}, nil, fleet.IdentityPolicy{}, nil).LimitConnections(config); err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if accept != "" {
		request.Header.Set("Accept", accept)
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	return response
}
