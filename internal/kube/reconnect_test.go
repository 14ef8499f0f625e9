package kube_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
