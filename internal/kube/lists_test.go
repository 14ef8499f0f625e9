package kube_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/towline/towline/internal/kube"
)

func TestLargeObjectsCountAsSeveral(t *testing.T) {
	t.Parallel()
	limit := kube.NewObjectLimit(10, "objects")
	for _, size := range []int{0, 100, 511} {
		if err := limit.Add(size); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if err := limit.Add(1 << 20); err == nil || err.Error() != "the cluster returned more than 10 objects" {
		t.Errorf("an object of a MiB: got error %v", err)
	}
	if err := limit.Add(6 << 9); err != nil {
		t.Errorf("an object that counts as seven: %v", err)
	}
	if err := limit.Add(0); err == nil {
		t.Error("an eleventh object is added")
	}
	limit.Remove(100)
	if err := limit.Add(0); err != nil {
		t.Errorf("after one was removed: %v", err)
	}
}

// newNamesStore returns a LimitedStore, and a function that lists ConfigMaps with these names for its reflector.
func newNamesStore(t *testing.T, limit *kube.ObjectLimit) (*kube.LimitedStore, func(names ...string) error) {
	t.Helper()
	store := kube.NewLimitedStore(cache.NewStore(cache.MetaNamespaceKeyFunc), limit, nil, func(obj runtime.Object) (runtime.Object, int) { return obj, 0 })
	return store, func(names ...string) error {
		source := store.ListWatch(&cache.ListWatch{ListWithContextFunc: func(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
			first := 0
			_, _ = fmt.Sscan(options.Continue, &first)
			list := &corev1.ConfigMapList{Items: []corev1.ConfigMap{{ObjectMeta: metav1.ObjectMeta{Name: names[first]}}}}
			if first++; first < len(names) {
				list.Continue = fmt.Sprint(first)
			}
			return list, nil
		}}, 1)
		_, err := source.ListWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		return err
	}
}

func TestListsShareALimit(t *testing.T) {
	t.Parallel()
	limit := kube.NewObjectLimit(3, "objects")
	first, listFirst := newNamesStore(t, limit)
	second, listSecond := newNamesStore(t, limit)
	want := func(step string, err error, wantErr bool) {
		t.Helper()
		if (err != nil) != wantErr {
			t.Errorf("%s: got error %v", step, err)
		}
	}
	want("the first list", listFirst("a", "b"), false)
	want("the first list again", listFirst("a", "b"), false)
	want("the second list", listSecond("a", "b"), true)
	want("a shorter second list", listSecond("a"), false)
	want("a name of a MiB", listSecond(strings.Repeat("a", 1<<20)), true)
	want("the first list is read", first.Replace(nil, "1"), false)
	want("the second list", listSecond("a", "b", "c"), false)
	second.Close()
	want("a list after the reflector has ended", listSecond("a"), true)
	want("the first list", listFirst("a", "b", "c"), false)
}
