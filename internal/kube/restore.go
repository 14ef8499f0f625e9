package kube

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// DetectRestore wraps lw. A watch from a resourceVersion that the API server has not reached fails as expired, so that
// the reflector lists again. Otherwise, after etcd was restored from a backup, such a watch would send no events. It
// costs one list with limit 1 per resumed watch. A watch that begins with a list needs no version.
func DetectRestore(lw cache.ListerWatcher) *cache.ListWatch {
	inner := cache.ToListerWatcherWithContext(lw)
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
			return inner.ListWithContext(ctx, opts)
		},
		WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
			switch {
			case ptr.Deref(opts.SendInitialEvents, false):
				// The API server of a restored etcd would wait for the version.
				opts.ResourceVersion = ""
			case opts.ResourceVersion != "" && opts.ResourceVersion != "0":
				list, err := inner.ListWithContext(ctx, metav1.ListOptions{Limit: 1, LabelSelector: opts.LabelSelector, FieldSelector: opts.FieldSelector})
				if err != nil {
					return nil, err
				}
				if err := checkReached(opts.ResourceVersion, list); err != nil {
					return nil, err
				}
			}
			return inner.WatchWithContext(ctx, opts)
		},
	}
}

// checkReached returns an error that makes a reflector list again if list is older than version.
func checkReached(version string, list runtime.Object) error {
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		return fmt.Errorf("read the version of a list: %w", err)
	}
	if order, err := resourceversion.CompareResourceVersion(accessor.GetResourceVersion(), version); err == nil && order < 0 {
		return apierrors.NewResourceExpired("the API server was restored from a backup: it is at resourceVersion " +
			accessor.GetResourceVersion() + ", before " + version)
	}
	return nil
}
