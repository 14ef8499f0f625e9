package karmada_test

import (
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/localkube/faults"
)

// observed calls before with each request of config, which is not sent if that returns an error.
func observed(config *rest.Config, before func(*http.Request) error) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if err := before(request); err != nil {
				return nil, err
			}
			return next.RoundTrip(request)
		})
	})
	return config
}

// createsBinding returns whether the request to the member gives the account its permissions.
func createsBinding(request *http.Request) bool {
	return request.Method == http.MethodPost && strings.HasSuffix(request.URL.Path, "/clusterrolebindings")
}

func TestRollbackKeepsObjectsOfLaterJoin(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	r := w.joinRequest("later")
	var hasFailed atomic.Bool
	var once sync.Once
	r.Member = observed(w.member.Config, func(request *http.Request) error {
		if createsBinding(request) && !hasFailed.Swap(true) {
			return faults.ErrConnection
		}
		if hasFailed.Load() {
			// The first one has deleted its Cluster, and begins to delete its objects on the member.
			once.Do(func() {
				if err := karmada.Join(t.Context(), w.joinRequest("later")); err != nil {
					t.Errorf("the later join: %v", err)
				}
			})
		}
		return nil
	})
	if err := karmada.Join(t.Context(), r); err == nil {
		t.Fatal("the first one joined")
	}
	wantJoined(t, w, w.joinRequest("later"))
	if err := karmada.Unjoin(t.Context(), w.unjoinRequest("later")); err != nil {
		t.Fatal(err)
	}
	wantSame(t, "the member", w.memberClient, before)
}

func TestFailedRollbackOnTheHubRemovesCredentials(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	r := w.joinRequest("staying")
	r.Hub = observed(w.hub.Config, func(request *http.Request) error {
		path := request.URL.Path
		// The last write to the Cluster fails, and so does its deletion.
		if strings.HasSuffix(path, "/clusters/staying") && request.Method != http.MethodGet {
			return faults.ErrConnection
		}
		return nil
	})
	err := karmada.Join(t.Context(), r)
	if err == nil || !strings.Contains(err.Error(), "roll back Cluster cluster.karmada.io staying") {
		t.Errorf("got %v, want an error that names the Cluster", err)
	}
	wantSame(t, "the member", w.memberClient, before)
	for _, own := range ownOn(t, w.hubClient, "staying") {
		if strings.HasPrefix(own, "Secret ") {
			t.Errorf("%s stays on the hub", own)
		}
	}
	if err := karmada.Unjoin(t.Context(), w.unjoinRequest("staying")); err != nil {
		t.Fatal(err)
	}
}
