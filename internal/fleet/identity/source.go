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
)

const (
	// issueLimit is how long a provider may take to issue a token. It is less than the time in which a member must answer.
	issueLimit = 8 * time.Second
	// failurePause is how long nobody asks again after a failure, so that many requests to a member do not become as many to the provider.
	failurePause = 5 * time.Second
	// maxMargin is how long before its end a token is renewed at the latest; one that lives less than five times as long, in its last fifth.
	maxMargin = 5 * time.Minute
	// unknownLife is how long a token is used whose provider does not say how long it lives.
	unknownLife = 5 * time.Minute
	// minRefusedAge is how old a token must be for its refusal by a member to be a reason to get another one.
	minRefusedAge = time.Minute
)

// Token lets the hub into a member until it expires.
type Token struct {
	Text    string
	Expires time.Time
}

// Options are what a Source needs beside the identity. The zero value is right for a hub.
type Options struct {
	// Client reaches the provider. Default: the provider's own.
	Client *http.Client
	// Clock tells how old tokens are. Default: the real one.
	Clock clock.PassiveClock
}

// issuer gets a new token. It keeps nothing, so that whatever changes in the hub's environment counts from the next token on.
type issuer func(context.Context) (Token, error)

// Source hands out the token of one member, and renews it before it expires. Use New.
type Source struct {
	provider libv1beta1.WorkloadIdentityProvider
	issue    issuer
	clock    clock.PassiveClock
	flight   singleflight.Group

	// mu guards what follows.
	mu       sync.Mutex
	token    Token
	issued   time.Time
	failure  error
	failedAt time.Time
}

// New returns the Source for w. It contacts nobody. It fails if w lacks something that a token needs; the error names the field.
func New(w *libv1beta1.WorkloadIdentity, o Options) (*Source, error) {
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	newIssuer, ok := map[libv1beta1.WorkloadIdentityProvider]func(*libv1beta1.WorkloadIdentity, Options) (issuer, error){
		libv1beta1.WorkloadIdentityAWS: newAWS, libv1beta1.WorkloadIdentityGCP: newGCP, libv1beta1.WorkloadIdentityAzure: newAzure,
	}[w.Provider]
	if !ok {
		return nil, fmt.Errorf("spec.workloadIdentity.provider: no tokens are known for %q", w.Provider)
	}
	issue, err := newIssuer(w, o)
	if err != nil {
		return nil, err
	}
	return &Source{provider: w.Provider, issue: issue, clock: o.Clock}, nil
}

// Token returns a token that has not expired. It fails when there is none, and the provider has not issued one before ctx ends or eight
// seconds have passed; the error names the provider and is one line.
func (s *Source) Token(ctx context.Context) (string, error) {
	have, due, failure := s.look()
	if !due {
		return have, nil
	}
	if failure == nil {
		failure = s.renew(ctx)
		have, _, _ = s.look()
	}
	if have != "" {
		// The old one is good for a while yet.
		return have, nil
	}
	return "", cmp.Or(failure, error(&tokenError{provider: s.provider, err: errors.New("the token issued has expired already: is the hub's clock right?")}))
}

// look returns the token, "" being one that has expired, whether another one is due, and why it was not issued just now.
func (s *Source) look() (have string, due bool, failure error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	if s.failure != nil && now.Sub(s.failedAt) < failurePause {
		failure = s.failure
	}
	if s.token.Text == "" || !now.Before(s.token.Expires) {
		return "", true, failure
	}
	margin := min(maxMargin, s.token.Expires.Sub(s.issued)/5)
	return s.token.Text, !now.Before(s.token.Expires.Add(-margin)), failure
}

// renew gets another token, once for all who ask at the same time. One of them that goes away takes nothing from the others.
func (s *Source) renew(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, issueLimit)
	defer cancel()
	done := s.flight.DoChan("", func() (any, error) {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), issueLimit)
		defer cancel()
		token, err := s.issue(limited)
		return nil, s.keep(token, err)
	})
	select {
	case result := <-done:
		return result.Err
	case <-waiting.Done():
		return &tokenError{provider: s.provider, err: fmt.Errorf("no token was issued within %s: %w", issueLimit, waiting.Err())}
	}
}

func (s *Source) keep(token Token, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.failure, s.failedAt = &tokenError{provider: s.provider, err: err}, s.clock.Now()
		return s.failure
	}
	s.token, s.issued, s.failure = token, s.clock.Now(), nil
	if token.Expires.IsZero() {
		s.token.Expires = s.issued.Add(unknownLife)
	}
	return nil
}

// refused makes the next request get another token, unless text has just been issued: then another one would be refused, too.
func (s *Source) refused(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.token.Text == text && s.clock.Since(s.issued) >= minRefusedAge {
		s.token = Token{}
	}
}
