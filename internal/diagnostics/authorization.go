package diagnostics

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	authenticationclient "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// reviewLimit is how long the API may take for one review.
	reviewLimit = 10 * time.Second
	// reviewsAtOnce bounds what strangers can make the API do through us, and, apart from that, what those can who were let in lately.
	reviewsAtOnce = 4
	// admittedFor is how long somebody who was let in is let in again without a review, and refusedFor how long somebody who was not is
	// not, without one. knownFor is how long somebody who was let in need not wait behind strangers.
	admittedFor = time.Minute
	refusedFor  = 10 * time.Second
	knownFor    = time.Hour
	// admittedMost and refusedMost are how many are remembered.
	admittedMost = 64
	refusedMost  = 1024
)

// guard lets those in that an API lets.
type guard struct {
	tokens authenticationclient.TokenReviewInterface
	rights authorizationclient.SubjectAccessReviewInterface
	// admitted, refused (with the HTTP status) and known remember each ask by its sum.
	admitted *cache.LRUExpireCache
	refused  *cache.LRUExpireCache
	known    *cache.LRUExpireCache
	// reviews and again hold those who are being reviewed: strangers, and those who were let in lately.
	reviews chan struct{}
	again   chan struct{}
	handler http.Handler
}

// ask is a request as far as it matters to whether it is let in.
type ask struct {
	token  string
	method string
	path   string
}

// sum tells asks apart in the space of a hash, however long they are.
func (a ask) sum() [sha256.Size]byte {
	token := sha256.Sum256([]byte(a.token))
	return sha256.Sum256([]byte(string(token[:]) + a.method + " " + a.path))
}

// Guard lets requests through to handler that carry a bearer token which the API of config knows (TokenReview), of somebody who may do
// there with the request's path what its method says (SubjectAccessReview of a non-resource URL). Others are answered with 401 and 403; 503
// if the API does not answer. What was allowed is allowed for another minute, and what was not is not for another ten seconds.
func Guard(config *rest.Config, handler http.Handler) (http.Handler, error) {
	config = rest.CopyConfig(config)
	config.Timeout = reviewLimit
	tokens, err := authenticationclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client for token reviews: %w", err)
	}
	rights, err := authorizationclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make client for access reviews: %w", err)
	}
	return &guard{
		tokens: tokens.TokenReviews(), rights: rights.SubjectAccessReviews(),
		admitted: cache.NewLRUExpireCache(admittedMost), refused: cache.NewLRUExpireCache(refusedMost), known: cache.NewLRUExpireCache(admittedMost),
		reviews: make(chan struct{}, reviewsAtOnce), again: make(chan struct{}, reviewsAtOnce), handler: handler,
	}, nil
}

// ServeHTTP answers a request, or says why not.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
		return
	}
	who := ask{token, strings.ToLower(r.Method), r.URL.Path}
	sum := who.sum()
	if _, ok := g.admitted.Get(sum); ok {
		g.handler.ServeHTTP(w, r)
		return
	}
	if status, ok := g.refused.Get(sum); ok {
		refuse(w, status.(int)) //nolint:forcetypeassert // nothing else is put there
		return
	}
	turns := g.reviews
	if _, ok := g.known.Get(sum); ok {
		turns = g.again
	}
	status, err := g.review(r.Context(), who, turns)
	switch {
	case err != nil:
		log.FromContext(r.Context()).Info("cannot find out who may read the metrics", "reason", err.Error())
		http.Error(w, "the API server cannot be asked", http.StatusServiceUnavailable)
	case status != http.StatusOK:
		g.known.Remove(sum)
		g.refused.Add(sum, status, refusedFor)
		refuse(w, status)
	default:
		g.admitted.Add(sum, struct{}{}, admittedFor)
		g.known.Add(sum, struct{}{}, knownFor)
		g.handler.ServeHTTP(w, r)
	}
}

func refuse(w http.ResponseWriter, status int) { http.Error(w, http.StatusText(status), status) }

// review asks the API, when it is its turn, and returns the HTTP status to answer with.
func (g *guard) review(ctx context.Context, who ask, turns chan struct{}) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewLimit)
	defer cancel()
	select {
	case turns <- struct{}{}:
		defer func() { <-turns }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	known, err := g.tokens.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: who.token}}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review token: %w", err)
	}
	if !known.Status.Authenticated {
		return http.StatusUnauthorized, nil
	}
	user := known.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	access, err := g.rights.Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: who.path, Verb: who.method},
	}}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review access: %w", err)
	}
	if !access.Status.Allowed {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
