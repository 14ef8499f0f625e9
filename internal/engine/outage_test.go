package engine_test

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/engine"
)

func TestNoRequestFollowsARequestWithoutResponse(t *testing.T) {
	t.Parallel()
	const parallel = 8
	c := newCluster(t)
	var dark atomic.Bool
	var requests atomic.Int32
	var objects []*unstructured.Unstructured
	for _, kind := range []string{"ConfigMap", "Secret", "ServiceAccount", "LimitRange", "ResourceQuota"} {
		for _, name := range []string{"a", "b", "c"} {
			obj := c.configMap(name, "")
			obj.SetKind(kind)
			unstructured.RemoveNestedField(obj.Object, "data")
			objects = append(objects, obj)
		}
	}
	c.cfg = rest.CopyConfig(c.cfg)
	c.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			// The cluster stops responding after the engine has read the record.
			if dark.Load() && strings.Contains(r.URL.Path, "/namespaces/"+c.ns+"/") {
				requests.Add(1)
				return nil, errCut
			}
			return next.RoundTrip(r)
		})
	})
	e := c.engine(nil)
	b := c.bundle("one", objects...)
	b.Options.ContinueOnError = true
	converge(t, e, b)
	dark.Store(true)
	wantConvergeError(t, e, b)
	if got := requests.Swap(0); got == 0 || got > parallel {
		t.Errorf("converging: %d requests without a response, want at most %d", got, parallel)
	}
	existing, err := e.Observe(t.Context(), b.ID)
	if got := requests.Load(); err == nil || got == 0 || got > parallel || len(existing) != len(objects) {
		t.Errorf("observing: %d requests without a response, %d observations, error %v", got, len(existing), err)
	}
	for _, one := range existing {
		if one.Health != engine.Unknown || one.Ref.Name == "" {
			t.Errorf("got %v", one)
		}
	}
}

func TestRequestWithoutResponseEnds(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	ended := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-ended:
		}
	}))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(ended) })
	e, err := engine.New(&rest.Config{Host: server.URL}, engine.Options{Namespace: c.records, RequestTimeout: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Converge(t.Context(), c.bundle("one", c.configMap("a", "")))
	if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
		t.Errorf("got %v, want a timeout", err)
	}
}
