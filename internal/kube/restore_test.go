package kube_test

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/kube"
)

// requestRecorder is a ListWatch of an API server at resourceVersion 10. It records the versions of the watches.
type requestRecorder struct {
	lists   int
	watches []string
}

func (r *requestRecorder) listWatch() *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			r.lists++
			return &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}, nil
		},
		WatchFuncWithContext: func(_ context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			r.watches = append(r.watches, opts.ResourceVersion)
			return watch.NewEmptyWatch(), nil
		},
	}
}

func TestDetectRestore(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		opts    metav1.ListOptions
		lists   int
		watches []string
		expired bool
	}{
		"a version of the past":   {metav1.ListOptions{ResourceVersion: "9"}, 1, []string{"9"}, false},
		"a version of the future": {metav1.ListOptions{ResourceVersion: "11"}, 1, nil, true},
		"any version":             {metav1.ListOptions{ResourceVersion: "0"}, 0, []string{"0"}, false},
		"a watch with a list":     {metav1.ListOptions{ResourceVersion: "11", SendInitialEvents: ptr.To(true)}, 0, []string{""}, false},
	} {
		recorder := &requestRecorder{}
		_, err := kube.DetectRestore(recorder.listWatch()).WatchWithContext(t.Context(), tc.opts)
		if apierrors.IsResourceExpired(err) != tc.expired || err != nil && !tc.expired {
			t.Errorf("%s: got error %v, want expired: %t", name, err, tc.expired)
		}
		if recorder.lists != tc.lists || !slices.Equal(recorder.watches, tc.watches) {
			t.Errorf("%s: got %d lists and watches from %q, want %d and %q", name, recorder.lists, recorder.watches, tc.lists, tc.watches)
		}
	}
}
