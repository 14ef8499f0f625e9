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

// TestResponsesOfMembersAreLimited reads an endless response.
func TestResponsesOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	text := bytes.Repeat([]byte("x"), 1<<20)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, err := io.WriteString(w, `{"gitVersion":"`)
		for err == nil {
			_, err = w.Write(text)
		}
	}))
	t.Cleanup(server.Close)
	response := get(t, server, "/version", "")
	defer response.Body.Close()
	if read, err := io.Copy(io.Discard, response.Body); err == nil || !strings.Contains(err.Error(), "the cluster returned data that needs too much memory: more than 512 MiB") {
		t.Errorf("read %d bytes, error %v", read, err)
	}
}

// TestContentOfMembers reads responses that need more memory than their text, or than the requested content.
func TestContentOfMembers(t *testing.T) {
	t.Parallel()
	const metadataOnly = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	const notJSON, tooMuch = "the cluster returned something other than JSON objects", "the cluster returned data that needs too much memory: more than 10 MiB"
	repeated := func(text string, n int) string { return strings.TrimSuffix(strings.Repeat(text+",", n), ",") }
	deep := `{"metadata":{"managedFields":[{"fieldsV1":{"f:a":[` + repeated(`{"":0}`, 20_000) + `]}}]}}`
	for name, test := range map[string]struct{ path, accept, contentType, body, want string }{
		"metadata":                {"/api/v1/pods", metadataOnly, "application/json", `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[` + deep + `]}`, ""},
		"metadata, not so asked":  {"/api/v1/pods", "application/json", "application/json", `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","items":[` + deep + `]}`, tooMuch},
		"table":                   {"/api/v1/pods", metadataOnly, "application/json", `{"kind":"Table","apiVersion":"meta.k8s.io/v1","rows":[{"cells":[[[[` + repeated(`{"":0}`, 20_000) + `]]]]}]}`, tooMuch},
		"few objects":             {"/api/v1/secrets", "", "application/json", `{"kind":"SecretList","apiVersion":"v1","items":[` + repeated("null", 1000) + `]}`, ""},
		"other objects":           {"/api/v1/secrets", "", "application/json", `{"kind":"CronJobList","apiVersion":"batch/v1","items":[` + repeated("null", 4000) + `]}`, tooMuch},
		"the kind at the end":     {"/api/v1/secrets", "", "application/json", `{"items":[` + repeated("null", 4000) + `],"apiVersion":"batch/v1","kind":"CronJobList"}`, tooMuch},
		"other APIs":              {"/apis/a/v1", "", "application/json", `{"items":[` + repeated("null", 4000) + `],"apiVersion":"batch/v1","kind":"CronJobList"}`, tooMuch},
		"APIs as YAML":            {"/apis/a/v1", "", "application/yaml", "kind: APIResourceList\napiVersion: v1\nresources:\n- {}\n", notJSON},
		"a list as YAML":          {"/api/v1/pods", "", "application/json", "- kind: A\n", notJSON},
		"Protobuf":                {"/version", "", "application/vnd.kubernetes.protobuf", "k8s\x00\x12\x00", notJSON},
		"a watch in Protobuf":     {"/api/v1/pods?watch=true", "", "application/vnd.kubernetes.protobuf;stream=watch", "\x00\x00\x00\x06k8s\x00\x12\x00", notJSON},
		"an object named healthz": {"/api/v1/namespaces/a/configmaps/healthz", metadataOnly, "application/vnd.kubernetes.protobuf", "k8s\x00\x12\x00", notJSON},
		"a log":                   {"/api/v1/namespaces/a/pods/b/log", "", "text/plain", "k8s\x00, kubectl", ""},
		"health":                  {"/readyz", "", "text/plain", "ok", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", test.contentType)
				_, _ = io.WriteString(w, test.body) // the client may have closed the connection
			}))
			t.Cleanup(server.Close)
			response := request(t, limitedConfigWith(t, server, kube.NewResponseMemory(20<<20)), test.path, test.accept)
			defer response.Body.Close()
			if _, err := io.Copy(io.Discard, response.Body); test.want == "" && err != nil || test.want != "" && (err == nil || err.Error() != test.want) {
				t.Errorf("got error %v, want %q", err, test.want)
			}
			if got := response.Header.Get("Content-Type"); test.contentType != "text/plain" && got != "application/json" {
				t.Errorf("the error is %s", got)
			}
		})
	}
}

// TestMembersDoNotSwitchProtocols reads an endless response that switches the protocol.
func TestMembersDoNotSwitchProtocols(t *testing.T) {
	t.Parallel()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		connection, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = connection.Close() }()
		_, _ = io.WriteString(connection, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\ntext") // the client may have closed the connection
	}))
	t.Cleanup(server.Close)
	client, err := rest.HTTPClientFor(limitedConfig(t, server))
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Get(server.URL + "/version")
	if err == nil {
		response.Body.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "the server switches the protocol, which was not requested") {
		t.Errorf("got error %v", err)
	}
}

// TestMembersMustNotReturnProtobuf checks that requests accept only JSON, because the limit of values works only for
// JSON.
func TestMembersMustNotReturnProtobuf(t *testing.T) {
	t.Parallel()
	const protobuf = "application/vnd.kubernetes.protobuf"
	var accepted string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		accepted = r.Header.Get("Accept")
		_, _ = io.WriteString(w, "k8s\x00\x12\x00") // the client may have closed the connection
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
		if body, err := io.ReadAll(response.Body); len(body) > 0 || err == nil || !strings.Contains(err.Error(), "something other than JSON objects") {
			t.Errorf("the body is %q, error %v", body, err)
		}
		response.Body.Close()
	}
}

// TestObjectsOfMembersAreJSON reads a JSON text that is another object if it is decoded as YAML.
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

// TestEventsOfMembersAreLimited watches objects of a member that sends one endless event.
func TestEventsOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	const sent = 300 << 20 // limits the memory of the test if the hub has no limit
	text := bytes.Repeat([]byte("x"), 1<<20)
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, err := io.WriteString(w, `{"type":"ADDED","object":{"metadata":{"name":"`)
		for n := 0; n < sent && err == nil; n += len(text) {
			_, err = w.Write(text)
		}
		_, _ = io.WriteString(w, `"}}}`) // the client may have closed the connection
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
	if status == nil || !strings.Contains(status.Message, "the cluster returned an event of more than 4 MiB") {
		t.Errorf("the watch returned %.200v", event)
	}
}

// TestHeadersOfMembersAreLimited reads a response with a long header.
func TestHeadersOfMembersAreLimited(t *testing.T) {
	t.Parallel()
	for _, isHTTP2 := range []bool{false, true} {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Text", strings.Repeat("x", 1<<20))
		}))
		server.EnableHTTP2 = isHTTP2
		server.StartTLS()
		t.Cleanup(server.Close)
		client, err := rest.HTTPClientFor(limitedConfig(t, server))
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Get(server.URL + "/version")
		if err == nil {
			response.Body.Close()
			t.Errorf("HTTP/2: %t: the header of %d bytes was read", isHTTP2, len(response.Header.Get("Text")))
		}
	}
}

// get sends a request to server like to a member.
func get(t *testing.T, server *httptest.Server, path, accept string) *http.Response {
	t.Helper()
	return request(t, limitedConfig(t, server), path, accept)
}

// request sends a request to the member of config.
func request(t *testing.T, config *rest.Config, path, accept string) *http.Response {
	t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, config.Host+path, nil)
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

// limitedConfig returns the configuration for requests to server like to a member.
func limitedConfig(t *testing.T, server *httptest.Server) *rest.Config {
	t.Helper()
	return limitedConfigWith(t, server, kube.NewResponseMemory(1<<30))
}

// limitedConfigWith is limitedConfig with a memory for responses.
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
