package identity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/utils/clock"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

const (
	// issueTimeout limits a token request to a provider. It is shorter than the time limit of a request to a member.
	issueTimeout = 8 * time.Second
	// failureBackoff is the minimal time between a failure and the next token request, so that many requests to a
	// member do not become many requests to the provider.
	failureBackoff = 5 * time.Second
	// maxRenewalMargin is the maximum time between the renewal of a token and its expiry. A token that lives for less than
	// 25 minutes is renewed in the last fifth of its lifetime.
	maxRenewalMargin = 5 * time.Minute
	// defaultLifetime is the lifetime of a token without an expiry.
	defaultLifetime = 5 * time.Minute
	// minRejectedAge is the minimal age of a token that is replaced because a member rejected it.
	minRejectedAge = time.Minute
)

// Token is a bearer token that a member accepts until it expires.
type Token struct {
	Text    string
	Expires time.Time
}

// Options configure a Source. The zero value is right for a hub.
type Options struct {
	// Client sends the requests to the provider. Default: the client of the provider's library.
	Client *http.Client
	// Clock gives the time. Default: the real clock.
	Clock clock.PassiveClock
	// VerifyEndpoint makes Token fail unless the provider confirms that the endpoint is a public endpoint of the cluster.
	// It has an effect only for GCP, whose clusters have IP addresses as endpoints.
	VerifyEndpoint bool
}

// issuer requests a new token. It keeps no state, so that changes of the hub's environment apply to the next token.
type issuer func(context.Context) (Token, error)

// Source returns the token of one member, and renews it before it expires. Create it with New. Its methods may be
// called concurrently.
type Source struct {
	provider libv1beta1.WorkloadIdentityProvider
	issue    issuer
	clock    clock.PassiveClock
	inFlight singleflight.Group

	// mu guards the fields below.
	mu       sync.Mutex
	token    Token
	issued   time.Time
	failure  error
	failedAt time.Time
}

// New returns the Source for w. It sends no request. It fails if w is incomplete; the error names the field.
func New(w *libv1beta1.WorkloadIdentity, o Options) (*Source, error) {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	if err := fleet.ValidateProvider(w); err != nil {
		return nil, err
	}
	newIssuer := map[libv1beta1.WorkloadIdentityProvider]func(*libv1beta1.WorkloadIdentity, Options) issuer{
		libv1beta1.WorkloadIdentityAWS: newAWS, libv1beta1.WorkloadIdentityGCP: newGCP, libv1beta1.WorkloadIdentityAzure: newAzure,
	}[w.Provider]
	return &Source{provider: w.Provider, issue: newIssuer(w, o), clock: o.Clock}, nil
}

// Token returns a token that has not expired. It fails if there is none and the provider does not issue one before ctx
// ends or eight seconds have passed. The error names the provider and is one line.
func (s *Source) Token(ctx context.Context) (string, error) {
	token, needsRenewal, failure := s.current()
	if !needsRenewal {
		return token, nil
	}
	if failure == nil {
		failure = s.renew(ctx)
		token, _, _ = s.current()
	}
	if token != "" {
		// The token needs a renewal, but is still valid.
		return token, nil
	}
	return "", cmp.Or(failure, error(&tokenError{provider: s.provider, err: errors.New("the token issued has expired already: is the hub's clock right?")}))
}

// current returns the token ("" if it has expired), whether it must be renewed, and the error of a recent failure.
func (s *Source) current() (token string, needsRenewal bool, failure error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	if s.failure != nil && now.Sub(s.failedAt) < failureBackoff {
		failure = s.failure
	}
	if s.token.Text == "" || !now.Before(s.token.Expires) {
		return "", true, failure
	}
	margin := min(maxRenewalMargin, s.token.Expires.Sub(s.issued)/5)
	return s.token.Text, !now.Before(s.token.Expires.Add(-margin)), failure
}

// renew requests another token, once for all concurrent callers. The end of one caller's context does not affect the
// others.
func (s *Source) renew(ctx context.Context) error {
	waitCtx, cancel := context.WithTimeout(ctx, issueTimeout)
	defer cancel()
	done := s.inFlight.DoChan("", func() (any, error) {
		issueCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), issueTimeout)
		defer cancel()
		token, err := s.issue(issueCtx)
		return nil, s.storeResult(token, err)
	})
	select {
	case result := <-done:
		return result.Err
	case <-waitCtx.Done():
		return &tokenError{provider: s.provider, err: fmt.Errorf("no token was issued within %s: %w", issueTimeout, waitCtx.Err())}
	}
}

// storeResult stores a new token, or the error of its request, which it returns.
func (s *Source) storeResult(token Token, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.failure, s.failedAt = &tokenError{provider: s.provider, err: err}, s.clock.Now()
		return s.failure
	}
	s.token, s.issued, s.failure = token, s.clock.Now(), nil
	if token.Expires.IsZero() {
		s.token.Expires = s.issued.Add(defaultLifetime)
	}
	return nil
}

// discard removes a token that the member rejected, unless it was issued just now: a new token would be rejected, too.
func (s *Source) discard(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.token.Text == text && s.clock.Since(s.issued) >= minRejectedAge {
		s.token = Token{}
	}
}
