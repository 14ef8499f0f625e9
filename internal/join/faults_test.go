package join_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// fault makes one writing request go wrong.
type fault struct {
	// at counts writing requests from one.
	at int64
	// strike says what happens to the request.
	strike func(request *http.Request, next http.RoundTripper) (*http.Response, error)
	seen   atomic.Int64
}

func (f *fault) on(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			if request.Method != http.MethodGet && f.seen.Add(1) == f.at {
				return f.strike(request, next)
			}
			return next.RoundTrip(request)
		})
	})
	return config
}

var errFault = errors.New("the line is cut")

// faults are the ways in which a request goes wrong. Each takes the registration's cancel function.
var faults = map[string]func(cancel func()) func(*http.Request, http.RoundTripper) (*http.Response, error){
	"refused": func(func()) func(*http.Request, http.RoundTripper) (*http.Response, error) {
		return func(*http.Request, http.RoundTripper) (*http.Response, error) { return nil, errFault }
	},
	"answer-lost": func(func()) func(*http.Request, http.RoundTripper) (*http.Response, error) {
		return func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
			if answer, err := next.RoundTrip(request); err == nil {
				answer.Body.Close()
			}
			return nil, errFault
		}
	},
	"interrupted": func(cancel func()) func(*http.Request, http.RoundTripper) (*http.Response, error) {
		return func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
			cancel()
			return next.RoundTrip(request)
		}
	},
	"forbidden": func(func()) func(*http.Request, http.RoundTripper) (*http.Response, error) {
		return func(request *http.Request, _ http.RoundTripper) (*http.Response, error) {
			body := `{"kind":"Status","apiVersion":"v1","status":"Failure","message":"not you","reason":"Forbidden","code":403}`
			return &http.Response{
				StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)),
				Request: request, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			}, nil
		}
	},
}

// leftBy is what is left of a registration of cluster c in the namespace.
func leftBy(t *testing.T, hubClient client.Client, namespace string) []string {
	t.Helper()
	left := inNamespace(t, hubClient, namespace)
	for _, name := range inNamespace(t, hubClient, kube.AgentNamespace) {
		if strings.HasPrefix(name, namespace+":") {
			left = append(left, name)
		}
	}
	return left
}

func TestAFailureAtAnyStepOfAFirstRegistrationLeavesNothing(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	// The shared Role stays, so that the first registration of all writes more.
	registered(t, plane, pullRequest(plane.Namespace(t, "warm"), "c"))
	count := &fault{}
	if err := join.RegisterPull(t.Context(), count.on(plane.Config), pullRequest("fault-count", "c"), io.Discard); err != nil {
		t.Fatal(err)
	}
	steps := count.seen.Load()
	if steps < 10 {
		t.Fatalf("writing requests: got %d, want at least ten", steps)
	}
	for kind, strike := range faults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			for at := int64(1); at <= steps; at++ {
				r := pullRequest(fmt.Sprintf("fault-%s-%d", kind, at), "c")
				ctx, cancel := context.WithCancel(t.Context())
				f := &fault{at: at, strike: strike(cancel)}
				err := join.RegisterPull(ctx, f.on(plane.Config), r, io.Discard)
				cancel()
				if err == nil {
					t.Errorf("step %d: got no error", at)
					continue
				}
				if left := leftBy(t, hubClient, r.Namespace); len(left) > 0 {
					t.Errorf("step %d: left: %v", at, left)
				}
				made := &corev1.Namespace{}
				if err := hubClient.Get(t.Context(), client.ObjectKey{Name: r.Namespace}, made); err == nil && made.DeletionTimestamp == nil {
					t.Errorf("step %d: the namespace that was made is still there", at)
				}
			}
		})
	}
}

func TestAFailureAtAnyStepOfAnotherRegistrationKeepsTheFirst(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	for kind, strike := range faults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := pullRequest(plane.Namespace(t, "refault"), "c")
			config, _ := agentConfig(t, registered(t, plane, r))
			before := leftBy(t, hubClient, r.Namespace)
			for at := int64(1); ; at++ {
				again := r
				again.Labels = map[string]string{"step": fmt.Sprint(at)}
				ctx, cancel := context.WithCancel(t.Context())
				f := &fault{at: at, strike: strike(cancel)}
				err := join.RegisterPull(ctx, f.on(plane.Config), again, io.Discard)
				cancel()
				if err == nil {
					if f.seen.Load() >= at {
						t.Errorf("step %d: got no error", at)
					}
					break
				}
				if diff := cmp.Diff(before, leftBy(t, hubClient, r.Namespace)); diff != "" {
					t.Errorf("step %d: objects (-before +after):\n%s", at, diff)
				}
				if labels := labelsOf(t, hubClient, r.Request); len(labels) > 0 {
					t.Errorf("step %d: labels: got %v, want none", at, labels)
				}
				if !accepted(t, config, r.Namespace) {
					t.Errorf("step %d: the first registration's credential is not accepted any more", at)
				}
			}
		})
	}
}

// A running hub adds its finalizer, and repairs what is missing, while the registration is at work.
func TestUndoingWaitsForTheHub(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := pullRequest(plane.Namespace(t, "withhub"), "c")
	took := make(chan error, 1)
	out := writer(func([]byte) (int, error) {
		cluster := clusterNamed(t, hubClient, r.Namespace, "c")
		cluster.Finalizers = []string{kube.FinalizerCluster}
		if err := hubClient.Update(t.Context(), cluster); err != nil {
			return 0, err
		}
		go func() {
			took <- removeFinalizers(t.Context(), hubClient, client.ObjectKeyFromObject(cluster))
		}()
		return 0, errors.New("broken pipe")
	})
	wantText(t, join.RegisterPull(t.Context(), plane.Config, r, out), "broken pipe")
	if err := <-took; err != nil {
		t.Error(err)
	}
	if left := leftBy(t, hubClient, r.Namespace); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// removeFinalizers takes the finalizer off a SveltosCluster once it is being deleted, as the hub does; before that it
// must not have lost its identity.
func removeFinalizers(ctx context.Context, hubClient client.Client, key client.ObjectKey) error {
	cluster := &libv1beta1.SveltosCluster{}
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		err := hubClient.Get(ctx, key, cluster)
		return err == nil && cluster.DeletionTimestamp != nil, err
	})
	if err != nil {
		return err
	}
	if err := hubClient.Get(ctx, key, &corev1.ServiceAccount{}); err != nil {
		return fmt.Errorf("the identity went before the SveltosCluster: %w", err)
	}
	return hubClient.Patch(ctx, cluster, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }
