package hub

import (
	"context"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
)

// TestCacheIsLoadedByOneList loads a cache: by a list of the newest state, and not by a watch that sends the objects
// one by one.
func TestCacheIsLoadedByOneList(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	receive := func(requests chan metav1.ListOptions) metav1.ListOptions {
		t.Helper()
		select {
		case opts := <-requests:
			return opts
		case <-ctx.Done():
			t.Fatal("there was no such request")
			return metav1.ListOptions{}
		}
	}
	lists, watches := make(chan metav1.ListOptions, 10), make(chan metav1.ListOptions, 10)
	informer := newInformer(&toolscache.ListWatch{
		ListWithContextFunc: func(_ context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			lists <- opts
			list := &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
			for i := range 3 {
				list.Items = append(list.Items, corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: strconv.Itoa(i)}})
			}
			if opts.Limit > 0 {
				list.Items, list.Continue = list.Items[:opts.Limit], "more"
			}
			return list, nil
		},
		WatchFuncWithContext: func(_ context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			watches <- opts
			return watch.NewFake(), nil
		},
	}, &corev1.ConfigMap{}, 0, nil)
	go informer.RunWithContext(ctx)
	if got := receive(lists); got.ResourceVersion != "" || got.Limit != 1 {
		t.Errorf("got a list with %+v first, want one object of the newest state", got)
	}
	if got := receive(lists); got.ResourceVersion != "7" || got.Limit != 0 || got.Continue != "" {
		t.Errorf("got a list with %+v, want the whole state that is as new as the first list", got)
	}
	if got := receive(watches); got.SendInitialEvents != nil || got.ResourceVersion != "7" {
		t.Errorf("got a watch with %+v, want one after the list", got)
	}
	if !toolscache.WaitForCacheSync(ctx.Done(), informer.HasSynced) || len(informer.GetStore().ListKeys()) != 3 {
		t.Errorf("got %v, want three objects", informer.GetStore().ListKeys())
	}
}

// TestCacheIsLoadedInPagesAfterATimeout fails each list of all objects.
func TestCacheIsLoadedInPagesAfterATimeout(t *testing.T) {
	t.Parallel()
	lw := newLister(&toolscache.ListWatch{ListWithContextFunc: func(_ context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		if opts.Limit == 0 {
			return nil, apierrors.NewTimeoutError("too slow", 0)
		}
		return &corev1.ConfigMapList{ListMeta: metav1.ListMeta{ResourceVersion: "7", Continue: strconv.Itoa(int(opts.Limit)) + opts.ResourceVersion}}, nil
	}})
	got, err := lw.ListWithContextFunc(t.Context(), metav1.ListOptions{ResourceVersion: "0", Limit: 500})
	if err != nil || got.(*corev1.ConfigMapList).Continue != "500" {
		t.Errorf("got %v, %v, want the first page of 500 of the newest state", got, err)
	}
}
