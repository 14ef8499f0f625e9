package kube_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/kube"
)

func TestRetryConnection(t *testing.T) {
	t.Parallel()
	unreachable := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	forbidden := errors.New("forbidden")
	lists, watches := 0, 0
	lw := kube.RetryConnection(&cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			if lists++; lists < 3 {
				return nil, unreachable
			}
			return &corev1.ConfigMapList{}, nil
		},
		WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
			if watches++; watches < 3 {
				return nil, unreachable
			}
			return nil, forbidden
		},
	}, time.Millisecond)
	if list, err := lw.ListWithContext(t.Context(), metav1.ListOptions{}); err != nil || list == nil || lists != 3 {
		t.Errorf("list: %v, %v after %d requests, want success after 3", list, err, lists)
	}
	if _, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{}); !errors.Is(err, forbidden) || watches != 3 {
		t.Errorf("watch: %v after %d requests, want the error of the response after 3", err, watches)
	}
}

// TestRetryConnectionAfterAnOutage has many clients without a connection for a minute, whose API server then forbids
// requests for some seconds. They get through soon after that, and with the same request.
func TestRetryConnectionAfterAnOutage(t *testing.T) {
	t.Parallel()
	starting := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "", errors.New("the roles are not read yet"))
	for name, err := range map[string]error{
		"forbidden": starting, "unauthorized": apierrors.NewUnauthorized("no"), "unavailable": apierrors.NewServiceUnavailable("starting"),
		"EOF": &url.Error{Err: io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				reachable, ready := began.Add(time.Minute), began.Add(75*time.Second)
				var clients sync.WaitGroup
				for range 100 {
					clients.Go(func() {
						lw := kube.RetryConnection(&cache.ListWatch{
							WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
								switch now := time.Now(); {
								case now.Before(reachable):
									return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
								case now.Before(ready):
									return nil, err
								}
								return watch.NewEmptyWatch(), nil
							},
						}, kube.AgentReconnectInterval)
						if _, err := lw.WatchWithContext(t.Context(), metav1.ListOptions{}); err != nil {
							t.Error(err)
						}
						if late := time.Since(ready); late > 2*kube.AgentReconnectInterval {
							t.Errorf("connected %s after the API server was ready", late)
						}
					})
				}
				clients.Wait()
			})
		})
	}
}

// A credential without permission is no outage.
func TestForbiddenWithoutAnOutageIsReturned(t *testing.T) {
	t.Parallel()
	forbidden := apierrors.NewForbidden(schema.GroupResource{}, "", errors.New("no role"))
	for name, outage := range map[string]int{"at once": 0, "for a long time after an outage": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				requests := 0
				lw := kube.RetryConnection(&cache.ListWatch{
					ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
						if requests++; requests <= outage {
							return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
						}
						return nil, forbidden
					},
				}, kube.AgentReconnectInterval)
				if _, err := lw.ListWithContext(t.Context(), metav1.ListOptions{}); !errors.Is(err, forbidden) {
					t.Errorf("got error %v", err)
				}
				if outage == 0 && requests != 1 {
					t.Errorf("%d requests, want 1", requests)
				}
			})
		})
	}
}

func TestRetryConnectionEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	lw := kube.RetryConnection(&cache.ListWatch{ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
		cancel()
		return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	}}, time.Hour)
	if _, err := lw.ListWithContext(ctx, metav1.ListOptions{}); err == nil {
		t.Error("got no error")
	}
}
