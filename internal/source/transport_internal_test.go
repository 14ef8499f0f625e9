package source

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Short fields of a header need ten times their size in memory, in each of many concurrent fetches.
func TestLargeHeadersAreRefused(t *testing.T) {
	t.Parallel()
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for i := range 20_000 {
			w.Header()[fmt.Sprint("X", i)] = []string{"a"}
		}
		w.WriteHeader(http.StatusNotFound)
	})
	for _, name := range []string{"HTTP/1.1", "HTTP/2"} {
		server := httptest.NewUnstartedServer(handler)
		server.EnableHTTP2 = name == "HTTP/2"
		server.StartTLS()
		t.Cleanup(server.Close)
		login := Login{CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), Username: "me", Password: "a"}
		charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
		if err != nil {
			t.Fatal(err)
		}
		fetchChart := func(repository string) error {
			_, err := charts.Fetch(t.Context(), configv1beta1.HelmChart{RepositoryURL: repository, ChartName: "a", ChartVersion: "1.0.0"}, login, Verification{}, nil)
			return err
		}
		_, errFile := fetchOnce(t, server.URL, remoteLogin{Login: login}, requestTimeout)
		for source, err := range map[string]error{
			"a chart repository": fetchChart(server.URL),
			"a registry":         fetchChart(strings.Replace(server.URL, "https", "oci", 1)),
			"a file":             errFile,
		} {
			if text := errorText(err); !strings.Contains(text, "exceeded") && !strings.Contains(text, "PROTOCOL_ERROR") {
				t.Errorf("%s, %s: got error %v, want an error about the header", name, source, err)
			}
		}
	}
	artifacts, err := NewArtifacts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	if err := artifacts.download(t.Context(), Artifact{URL: handle(t, handler), Digest: "sha256:aa"}, "a"); !strings.Contains(errorText(err), "exceeded") {
		t.Errorf("an artifact of Flux: got error %v, want an error about the header", err)
	}
}
