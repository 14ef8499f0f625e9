package engine

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/transport"
)

// accountKey is the key of a context with the ServiceAccount that writes objects.
type accountKey struct{}

// withAccount returns a context whose write requests are sent as the ServiceAccount "namespace/name", or as this engine
// itself if it is "". Requests that only read are always sent as this engine: a ServiceAccount that may write some
// objects of a kind need not be able to read all of them.
func withAccount(ctx context.Context, account string) context.Context {
	return context.WithValue(ctx, accountKey{}, account)
}

// asAccountIfForbidden sends a request, and again as the ServiceAccount account if it is forbidden. Errors of both name
// the missing verbs.
func asAccountIfForbidden(ctx context.Context, account string, request func(context.Context) error) error {
	err := request(ctx)
	if account == "" || !apierrors.IsForbidden(err) {
		return err
	}
	if accountErr := request(withAccount(ctx, account)); accountErr != nil {
		return fmt.Errorf("%w; as ServiceAccount %s: %w", err, account, accountErr)
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
	account, _ := request.Context().Value(accountKey{}).(string)
	if account == "" || request.Method == http.MethodGet {
		return i.next.RoundTrip(request)
	}
	namespace, name, ok := strings.Cut(account, "/")
	if !ok {
		return nil, fmt.Errorf("write as ServiceAccount %q: it is not namespace/name", account)
	}
	request = request.Clone(request.Context())
	request.Header.Set(transport.ImpersonateUserHeader, "system:serviceaccount:"+namespace+":"+name)
	return i.next.RoundTrip(request)
}
