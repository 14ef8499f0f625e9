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

// reviewer is the part of an API that reviews, and counts how often it was asked about a token. Only "reader" may read. It keeps those
// waiting whose token begins with "slow" until it is let go.
type reviewer struct {
	release chan struct{}
	// waiting gets one value per review that is kept waiting.
	waiting chan struct{}
	// mu guards asked.
	mu    sync.Mutex
	asked map[string]int
}

// ServeHTTP answers reviews of tokens and of rights.
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
	r.asked[token]++
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
	return r.asked[token]
}

// ask asks guarded for the metrics with a token and returns the status.
func ask(guarded http.Handler, path, token string) int {
	request := httptest.NewRequest(http.MethodGet, path, nil)
	request.Header.Set("Authorization", "Bearer "+token)
	answer := httptest.NewRecorder()
	guarded.ServeHTTP(answer, request)
	return answer.Code
}

func TestGuardRemembersAnswersAndLetsKnownTokensFirst(t *testing.T) {
	t.Parallel()
	api := &reviewer{release: make(chan struct{}), waiting: make(chan struct{}), asked: map[string]int{}}
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	guarded, err := diagnostics.Guard(&rest.Config{Host: server.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]int{
		"reader": http.StatusOK, "stranger": http.StatusForbidden, "unknown": http.StatusUnauthorized,
	} {
		for range 3 {
			if got := ask(guarded, "/metrics", token); got != want {
				t.Errorf("%s: got %d, want %d", token, got, want)
			}
		}
		if got := api.count(token); got != 1 {
			t.Errorf("%s: reviewed %d times, want once", token, got)
		}
	}
	// Strangers keep all turns that are theirs busy.
	var strangers sync.WaitGroup
	defer strangers.Wait()
	defer close(api.release)
	for _, name := range []string{"slow-1", "slow-2", "slow-3", "slow-4"} {
		strangers.Go(func() { ask(guarded, "/metrics", name) })
		<-api.waiting
	}
	if got := ask(guarded, "/metrics", "reader"); got != http.StatusOK {
		t.Errorf("reader among strangers: got %d", got)
	}
}
