package join_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/transport"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/localkube/faults"
)

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one that contains %q", err, text)
	}
}

func items(t *testing.T, list client.ObjectList) []client.Object {
	t.Helper()
	var objects []client.Object
	raw, err := meta.ExtractList(list)
	if err != nil {
		t.Fatal(err)
	}
	for _, obj := range raw {
		objects = append(objects, obj.(client.Object))
	}
	return objects
}

// failing is an output on which every write fails.
type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// cancelOn ends a context when a request to a path with this end is about to be sent.
func cancelOn(cancel context.CancelFunc, suffix string) transport.WrapperFunc {
	return func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if strings.HasSuffix(request.URL.Path, suffix) {
				cancel()
			}
			return next.RoundTrip(request)
		})
	}
}

// eventually fails the test if check does not return true within 30 seconds.
func eventually(t *testing.T, what string, check func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		return check(), nil
	})
	if err != nil {
		t.Fatalf("wait until %s: %v", what, err)
	}
}
