package engine

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/transport"

	"github.com/towline/towline/internal/bundle"
)

// accountKey is the context key of an identity.
type accountKey struct{}

// identity is the ServiceAccount "namespace/name" as which requests are sent, "" for this engine itself.
type identity struct {
	account string
	// reads is true if requests that only read are also sent as the ServiceAccount.
	reads bool
}

// withAccount returns a context whose write requests are sent as the ServiceAccount account, or as this engine itself
// if it is "". Requests that only read are sent as this engine: a ServiceAccount that may write some objects of a kind
// need not be able to read all of them. Their responses must be metadata, or must not leave the engine.
func withAccount(ctx context.Context, account string) context.Context {
	return context.WithValue(ctx, accountKey{}, identity{account: account})
}

// withReadingAccount returns a context whose requests are all sent as the ServiceAccount account, also those that only
// read. It is for responses that get into reports or affect the objects that the engine writes, such as Helm's release
// records.
func withReadingAccount(ctx context.Context, account string) context.Context {
	return context.WithValue(ctx, accountKey{}, identity{account: account, reads: true})
}

// removeAs sends a request that removes an object, as the ServiceAccount account. If that is forbidden and isCreated is
// true, it sends the request as this engine: a withdrawal must not fail because the ServiceAccount has lost its rights.
// isCreated must be false unless the ServiceAccount or this engine certainly created the object: otherwise a
// ServiceAccount that may only change an object could delete it. The error has the missing verbs of both identities.
func removeAs(ctx context.Context, account string, isCreated bool, request func(context.Context) error) error {
	err := request(withAccount(ctx, account))
	if account == "" || !isCreated || !apierrors.IsForbidden(err) {
		return err
	}
	if ownErr := request(withAccount(ctx, "")); ownErr != nil {
		return fmt.Errorf("%w; without impersonation: %w", err, ownErr)
	}
	return nil
}

// impersonator sends requests with the ServiceAccount of their context.
type impersonator struct{ next http.RoundTripper }

// newImpersonator is a transport.WrapperFunc.
func newImpersonator(next http.RoundTripper) http.RoundTripper { return impersonator{next: next} }

var _ transport.WrapperFunc = newImpersonator

// RoundTrip implements http.RoundTripper.
func (i impersonator) RoundTrip(request *http.Request) (*http.Response, error) {
	as, _ := request.Context().Value(accountKey{}).(identity)
	if as.account == "" || request.Method == http.MethodGet && !as.reads {
		return i.next.RoundTrip(request)
	}
	user, err := bundle.ServiceAccountUser(as.account)
	if err != nil {
		return nil, err
	}
	request = request.Clone(request.Context())
	// A kubeconfig can impersonate a user, too. client-go has set its groups, which the ServiceAccount must not have.
	maps.DeleteFunc(request.Header, func(name string, _ []string) bool { return strings.HasPrefix(name, "Impersonate-") })
	request.Header.Set(transport.ImpersonateUserHeader, user)
	return i.next.RoundTrip(request)
}
