package diagnostics_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/diagnostics"
)

// reviewer is an API server for reviews. It counts the reviews of each token, authorises only "reader", and delays the
// reviews of tokens with the prefix "slow" until release is closed.
type reviewer struct {
	release chan struct{}
	// waiting receives a value for each delayed review.
	waiting chan struct{}
	// mu guards reviews.
	mu      sync.Mutex
	reviews map[string]int
}

// ServeHTTP responds to token and access reviews.
func (r *reviewer) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if strings.HasSuffix(request.URL.Path, "/subjectaccessreviews") {
		review := authorizationv1.SubjectAccessReview{}
		_ = json.NewDecoder(request.Body).Decode(&review)
		review.Status.Allowed = review.Spec.User == "reader"
		_ = json.NewEncoder(w).Encode(review)
		return
	}
	review := authenticationv1.TokenReview{}
	_ = json.NewDecoder(request.Body).Decode(&review)
	token := review.Spec.Token
	r.mu.Lock()
	r.reviews[token]++
	r.mu.Unlock()
	if strings.HasPrefix(token, "slow") {
		r.waiting <- struct{}{}
		<-r.release
	}
	review.Status.Authenticated = token != "unknown"
	review.Status.User.Username = token
	_ = json.NewEncoder(w).Encode(review)
}

func (r *reviewer) count(token string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reviews[token]
}

// request requests the metrics with a token and returns the status.
func request(handler http.Handler, path, token string) int {
	request := httptest.NewRequest(http.MethodGet, path, nil)
	request.Header.Set("Authorization", "Bearer "+token)
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, request)
	return answer.Code
}

func TestResultsAreCachedAndKnownTokensDoNotWait(t *testing.T) {
	t.Parallel()
	api := &reviewer{release: make(chan struct{}), waiting: make(chan struct{}), reviews: map[string]int{}}
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	handler, err := diagnostics.RequireAuthorization(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]int{
		"reader": http.StatusOK, "stranger": http.StatusForbidden, "unknown": http.StatusUnauthorized,
	} {
		for range 3 {
			if got := request(handler, "/metrics", token); got != want {
				t.Errorf("%s: got %d, want %d", token, got, want)
			}
		}
		if got := api.count(token); got != 1 {
			t.Errorf("%s: reviewed %d times, want once", token, got)
		}
	}
	// Unknown clients occupy all their slots.
	var unknown sync.WaitGroup
	defer unknown.Wait()
	defer close(api.release)
	for _, name := range []string{"slow-1", "slow-2", "slow-3", "slow-4"} {
		unknown.Go(func() { request(handler, "/metrics", name) })
		<-api.waiting
	}
	if got := request(handler, "/metrics", "reader"); got != http.StatusOK {
		t.Errorf("reader among strangers: got %d", got)
	}
}
