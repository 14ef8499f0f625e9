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
	// reviewTimeout limits a request for a review, including the wait for a free slot.
	reviewTimeout = 10 * time.Second
	// maxConcurrentReviews limits the reviews of known clients, and separately the reviews of unknown ones, to protect
	// the API server.
	maxConcurrentReviews = 4
	// allowedTTL and deniedTTL are the times for which a result is reused without another review. A client that was
	// allowed is known for knownTTL, and does not wait behind unknown clients.
	allowedTTL = time.Minute
	deniedTTL  = 10 * time.Second
	knownTTL   = time.Hour
	// maxAllowed limits the allowed and the known requests in the cache, and maxDenied the denied ones.
	maxAllowed = 64
	maxDenied  = 1024
)

// authorizer is the handler of RequireAuthorization.
type authorizer struct {
	tokenReviews  authenticationclient.TokenReviewInterface
	accessReviews authorizationclient.SubjectAccessReviewInterface
	// allowed, denied and known have accessRequest.hash as the key. The values of denied are HTTP status codes.
	allowed *cache.LRUExpireCache
	denied  *cache.LRUExpireCache
	known   *cache.LRUExpireCache
	// unknownSlots and knownSlots hold a value for each running review.
	unknownSlots chan struct{}
	knownSlots   chan struct{}
	handler      http.Handler
}

// accessRequest has the parts of a request that determine whether it is allowed.
type accessRequest struct {
	token  string
	method string
	path   string
}

// hash returns a key of fixed size, for tokens of any length.
func (a accessRequest) hash() [sha256.Size]byte {
	token := sha256.Sum256([]byte(a.token))
	return sha256.Sum256([]byte(string(token[:]) + a.method + " " + a.path))
}

// RequireAuthorization returns a handler that passes a request to handler if the API of config authenticates its bearer
// token (TokenReview) and authorises its user for the method and path of the request (SubjectAccessReview of a
// non-resource URL). It responds to other requests with 401 or 403, and with 503 if the API does not answer. It reuses
// a positive result for one minute and a negative result for ten seconds.
func RequireAuthorization(config *rest.Config, handler http.Handler) (http.Handler, error) {
	config = rest.CopyConfig(config)
	config.Timeout = reviewTimeout
	tokenReviews, err := authenticationclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create a client for token reviews: %w", err)
	}
	accessReviews, err := authorizationclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("create a client for access reviews: %w", err)
	}
	return &authorizer{
		tokenReviews: tokenReviews.TokenReviews(), accessReviews: accessReviews.SubjectAccessReviews(),
		allowed: cache.NewLRUExpireCache(maxAllowed), denied: cache.NewLRUExpireCache(maxDenied), known: cache.NewLRUExpireCache(maxAllowed),
		unknownSlots: make(chan struct{}, maxConcurrentReviews), knownSlots: make(chan struct{}, maxConcurrentReviews), handler: handler,
	}, nil
}

// ServeHTTP implements http.Handler.
func (a *authorizer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || token == "" {
		http.Error(w, "a bearer token is required", http.StatusUnauthorized)
		return
	}
	request := accessRequest{token, strings.ToLower(r.Method), r.URL.Path}
	key := request.hash()
	if _, ok := a.allowed.Get(key); ok {
		a.handler.ServeHTTP(w, r)
		return
	}
	if status, ok := a.denied.Get(key); ok {
		deny(w, status.(int)) //nolint:forcetypeassert // it has no other values
		return
	}
	slots := a.unknownSlots
	if _, ok := a.known.Get(key); ok {
		slots = a.knownSlots
	}
	status, err := a.review(r.Context(), request, slots)
	switch {
	case err != nil:
		log.FromContext(r.Context()).Info("cannot authorise a request for diagnostics", "reason", err.Error())
		http.Error(w, "the API server does not answer the review", http.StatusServiceUnavailable)
	case status != http.StatusOK:
		a.known.Remove(key)
		a.denied.Add(key, status, deniedTTL)
		deny(w, status)
	default:
		a.allowed.Add(key, struct{}{}, allowedTTL)
		a.known.Add(key, struct{}{}, knownTTL)
		a.handler.ServeHTTP(w, r)
	}
}

func deny(w http.ResponseWriter, status int) { http.Error(w, http.StatusText(status), status) }

// review waits for a free slot, sends the two reviews, and returns the HTTP status of the result.
func (a *authorizer) review(ctx context.Context, request accessRequest, slots chan struct{}) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	authenticated, err := a.tokenReviews.Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: request.token}}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review token: %w", err)
	}
	if !authenticated.Status.Authenticated {
		return http.StatusUnauthorized, nil
	}
	user := authenticated.Status.User
	extra := make(map[string]authorizationv1.ExtraValue, len(user.Extra))
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	access, err := a.accessReviews.Create(ctx, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: request.path, Verb: request.method},
	}}, metav1.CreateOptions{})
	if err != nil {
		return 0, fmt.Errorf("review access: %w", err)
	}
	if !access.Status.Allowed {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
