package fluxsources

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/source"
)

// installBuckets installs the CRD of Buckets.
func installBuckets(t *testing.T, plane *localkube.Plane) {
	t.Helper()
	api, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	group := source.FluxGroupVersion().Group
	err = api.Create(t.Context(), &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: "buckets." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Kind: "Bucket", ListKind: "BucketList", Plural: "buckets", Singular: "bucket"},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{
				Name: source.FluxGroupVersion().Version, Served: true, Storage: true,
				Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: ptr.To(true)}},
			}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func newWatcher(t *testing.T, config *rest.Config) (w *Watcher, isReferenced *atomic.Bool) {
	t.Helper()
	httpClient, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	mapper, err := apiutil.NewDynamicRESTMapper(config, httpClient)
	if err != nil {
		t.Fatal(err)
	}
	isReferenced = &atomic.Bool{}
	w = New()
	w.Mapper, w.IsReferenced, w.Changed = mapper, func(kind string) bool { return kind == "Bucket" && isReferenced.Load() }, func(source.Reference) {}
	w.NewCache = func(options cache.Options) (cache.Cache, error) {
		options.Mapper = mapper
		return cache.New(config, options)
	}
	return w, isReferenced
}

// awaitAnswer calls Get until it returns the error that isAnswer accepts.
func awaitAnswer(t *testing.T, w *Watcher, ref source.Reference, isAnswer func(error) bool) {
	t.Helper()
	var last error
	await(t, func() bool {
		w.check(t.Context(), ref.Kind)
		_, last = w.Get(t.Context(), ref)
		return isAnswer(last)
	}, func() string { return fmt.Sprint(last) })
}

func await(t *testing.T, isDone func() bool, describe func() string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return isDone(), nil })
	if err != nil {
		t.Fatalf("got %s", describe())
	}
}

func TestKindIsWatchedWhileItIsReferenced(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	w, isReferenced := newWatcher(t, plane.Config)
	ref := source.Reference{Kind: "Bucket", Namespace: "default", Name: "app"}
	isPending := func(err error) bool {
		_, ok := errors.AsType[*source.PendingError](err)
		return ok
	}
	w.check(t.Context(), "Bucket")
	if _, err := w.Get(t.Context(), ref); !isPending(err) {
		t.Errorf("before it is referenced: got %v, want a PendingError", err)
	}
	isReferenced.Store(true)
	awaitAnswer(t, w, ref, func(err error) bool {
		// It is not ErrNotFound: without the CRD, nothing of an optional source is deleted.
		return err != nil && !errors.Is(err, source.ErrNotFound) && strings.Contains(err.Error(), "the hub has no kind Bucket")
	})
	installBuckets(t, plane)
	awaitAnswer(t, w, ref, apierrors.IsNotFound)
	informer := w.kinds["Bucket"].informer
	w.check(t.Context(), "Bucket")
	if w.kinds["Bucket"].informer != informer {
		t.Error("a watched kind is watched again")
	}
	isReferenced.Store(false)
	w.check(t.Context(), "Bucket")
	if _, err := w.Get(t.Context(), ref); !isPending(err) {
		t.Errorf("after the last reference: got %v, want a PendingError", err)
	}
	await(t, informer.IsStopped, func() string { return "a watch that has not ended" })
}

func TestListThatIsForbiddenIsReported(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	installBuckets(t, plane)
	config := rest.CopyConfig(plane.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "nobody", Groups: []string{"system:authenticated"}}
	w, isReferenced := newWatcher(t, config)
	isReferenced.Store(true)
	ref := source.Reference{Kind: "Bucket", Namespace: "default", Name: "app"}
	awaitAnswer(t, w, ref, func(err error) bool {
		return err != nil && strings.HasPrefix(err.Error(), "Bucket default/app: list the kind Bucket on the hub: ") && strings.Contains(err.Error(), "forbidden")
	})
}
