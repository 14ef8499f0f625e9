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
	// reviewsAtOnce bounds what strangers can make the API do through us.
	reviewsAtOnce = 4
	// admittedFor is how long somebody who was let in is let in again without a review; admittedMost is how many are remembered.
	admittedFor  = time.Minute
	admittedMost = 64
)

// guard lets those in that an API lets.
type guard struct {
	tokens   authenticationclient.TokenReviewInterface
	rights   authorizationclient.SubjectAccessReviewInterface
	admitted *cache.LRUExpireCache
	reviews  chan struct{}
	handler  http.Handler
}

// ask is a request as far as it matters to whether it is let in.
type ask struct {
	token  [sha256.Size]byte
	method string
	path   string
}

// Guard lets requests through to handler that carry a bearer token which the API of config knows (TokenReview), of somebody who may do
// there with the request's path what its method says (SubjectAccessReview of a non-resource URL). Others are answered with 401 and 403; 503
// if the API does not answer. What was allowed is allowed for another minute.
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
		admitted: cache.NewLRUExpireCache(admittedMost), reviews: make(chan struct{}, reviewsAtOnce), handler: handler,
	}, nil
}

// ServeHTTP answers a request, or says why not.
func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		http.Error(w, "a bearer token is needed", http.StatusUnauthorized)
		return
	}
	who := ask{sha256.Sum256([]byte(token)), strings.ToLower(r.Method), r.URL.Path}
	if _, ok := g.admitted.Get(who); ok {
		g.handler.ServeHTTP(w, r)
		return
	}
	status, err := g.review(r.Context(), token, who)
	switch {
	case err != nil:
		log.FromContext(r.Context()).Info("cannot find out who may read the metrics", "reason", err.Error())
		http.Error(w, "the API server cannot be asked", http.StatusServiceUnavailable)
	case status != http.StatusOK:
		http.Error(w, http.StatusText(status), status)
	default:
		g.admitted.Add(who, struct{}{}, admittedFor)
		g.handler.ServeHTTP(w, r)
	}
}

// review asks the API and returns the HTTP status to answer with.
func (g *guard) review(ctx context.Context, token string, who ask) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewLimit)
	defer cancel()
	select {
	case g.reviews <- struct{}{}:
		defer func() { <-g.reviews }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	known, err := g.tokens.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, metav1.CreateOptions{})
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
