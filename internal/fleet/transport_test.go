package fleet_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
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
	if read, err := io.Copy(io.Discard, response.Body); err == nil || !strings.Contains(err.Error(), "the cluster returned what needs more than 512 MiB of memory") {
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

// TestEventsOfMembersAreLimited watches objects of a member that sends one event without end.
func TestEventsOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	const sent = 300 << 20 // a hub without limits must fail, and not fill the machine of the test
	text := bytes.Repeat([]byte("x"), 1<<20)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, err := io.WriteString(w, `{"type":"ADDED","object":{"metadata":{"name":"`)
		for n := 0; n < sent && err == nil; n += len(text) {
			_, err = w.Write(text)
		}
		_, _ = io.WriteString(w, `"}}}`) // the client may have gone
	}))
	t.Cleanup(server.Close)
	objects, err := metadata.NewForConfig(limitedConfig(t, server))
	if err != nil {
		t.Fatal(err)
	}
	events, err := objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "secrets"}).Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Stop()
	event := <-events.ResultChan()
	status, _ := event.Object.(*metav1.Status)
	if status == nil || !strings.Contains(status.Message, "the cluster returned what needs more than 512 MiB of memory") {
		t.Errorf("the watch returned %.200v", event)
	}
}

// TestHeadersOfMembersAreLimited reads a response with a header without end.
func TestHeadersOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Text", strings.Repeat("x", 1<<20))
	}))
	t.Cleanup(server.Close)
	client, err := rest.HTTPClientFor(limitedConfig(t, server))
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/version", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err == nil {
		response.Body.Close()
		t.Errorf("the header of %d bytes was read", len(response.Header.Get("Text")))
	}
}

// get sends a request to server as to a member.
func get(t *testing.T, server *httptest.Server, path, accept string) *http.Response {
	t.Helper()
	client, err := rest.HTTPClientFor(limitedConfig(t, server))
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

// limitedConfig returns the configuration for requests to server as to a member.
func limitedConfig(t *testing.T, server *httptest.Server) *rest.Config {
	t.Helper()
	return limitedConfigWith(t, server, kube.NewResponseMemory(1<<30))
}

// limitedConfigWith is limitedConfig with the memory for responses.
func limitedConfigWith(t *testing.T, server *httptest.Server, memory *kube.ResponseMemory) *rest.Config {
	t.Helper()
	config := &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: []byte(authorityOf(server))}}
	clients := fleet.NewClients(fleet.SecretReaders{}, nil, fleet.IdentityPolicy{}, nil)
	clients.SetResponseMemory(memory)
	if err := clients.LimitConnections(config, "eu"); err != nil {
		t.Fatal(err)
	}
	return config
}
