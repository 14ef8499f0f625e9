package join_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

// clientOf returns a client that sends no requests for discovery.
func clientOf(t *testing.T, config *rest.Config, hubClient client.Client) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: kube.Scheme(), Mapper: hubClient.RESTMapper()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestEstablishNewReadsOnlyThePolicy(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	established(t, hubClient, declared(t, hubClient, newNamespace(t, hubClient, "warm"), "c"))
	var mu sync.Mutex // guards methods
	methods := map[string]int{}
	config := rest.CopyConfig(plane.Config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			mu.Lock()
			defer mu.Unlock()
			methods[request.Method]++
			return next.RoundTrip(request)
		})
	})
	counting := clientOf(t, config, hubClient)
	namespace := newNamespace(t, hubClient, "new")
	for _, test := range []struct {
		cluster, delivery string
		want              map[string]int
	}{
		// The policy and its binding; the claim; ServiceAccount, anchor Secret, Lease, Role and two RoleBindings.
		{"one", namespace, map[string]int{http.MethodGet: 2, http.MethodPatch: 1, http.MethodPost: 6}},
		// The annotation with the delivery namespace; that namespace, and a Role and a RoleBinding in it.
		{"two", namespace + "--two", map[string]int{http.MethodGet: 2, http.MethodPatch: 1, http.MethodPost: 9}},
	} {
		cluster := declared(t, hubClient, namespace, test.cluster)
		clear(methods)
		delivery, err := join.EstablishNew(t.Context(), counting, hubClient, cluster)
		if err != nil || delivery != test.delivery {
			t.Fatalf("%s: got delivery namespace %q and error %v, want %s", test.cluster, delivery, err, test.delivery)
		}
		if diff := cmp.Diff(test.want, methods); diff != "" {
			t.Errorf("requests for %s (-want +got):\n%s", test.cluster, diff)
		}
		before := versions(t, hubClient, namespace, test.delivery)
		established(t, hubClient, cluster)
		if diff := cmp.Diff(before, versions(t, hubClient, namespace, test.delivery)); diff != "" {
			t.Errorf("Establish changes %s (-before +after):\n%s", test.cluster, diff)
		}
	}
}

// staleReader returns former versions of namespaces, and NotFound for a nil version.
type staleReader struct {
	client.Reader
	former map[string]*metav1.PartialObjectMetadata
}

func (r staleReader) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	namespace, isStale := r.former[key.Name]
	switch {
	case !isStale:
		return r.Reader.Get(ctx, key, obj, opts...)
	case namespace == nil:
		return apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, key.Name)
	}
	namespace.DeepCopyInto(obj.(*metav1.PartialObjectMetadata))
	return nil
}

func TestEstablishNewWithAStaleCache(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	established(t, hubClient, declared(t, hubClient, newNamespace(t, hubClient, "warm"), "c"))
	claimedBy := func(holder string) func(*metav1.PartialObjectMetadata) {
		return func(n *metav1.PartialObjectMetadata) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, kube.AnnotationDeliveryHolder, holder)
		}
	}
	for name, test := range map[string]struct {
		// change makes the former version of the namespace; nil if it did not exist.
		change func(*metav1.PartialObjectMetadata)
		// holder is the cluster that has claimed the namespace meanwhile.
		holder  string
		derived bool
	}{
		"without the namespace":          {},
		"with another version":           {change: func(n *metav1.PartialObjectMetadata) { n.ResourceVersion = "1" }},
		"without the claim of another":   {change: func(n *metav1.PartialObjectMetadata) { n.ResourceVersion = "1" }, holder: "other", derived: true},
		"with the former claim":          {change: claimedBy("c")},
		"with a claim that was released": {change: claimedBy("other"), derived: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			namespace := newNamespace(t, hubClient, "stale")
			former := &metav1.PartialObjectMetadata{}
			former.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
			if err := hubClient.Get(t.Context(), client.ObjectKey{Name: namespace}, former); err != nil {
				t.Fatal(err)
			}
			cache := staleReader{hubClient, map[string]*metav1.PartialObjectMetadata{namespace: nil}}
			if test.change != nil {
				test.change(former)
				cache.former[namespace] = former
			}
			if test.holder != "" {
				annotate(t, hubClient, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, kube.AnnotationDeliveryHolder, test.holder)
			}
			cluster := declared(t, hubClient, namespace, "c")
			delivery, err := join.EstablishNew(t.Context(), hubClient, cache, cluster)
			if err != nil {
				t.Fatal(err)
			}
			want, holder := namespace, "c"
			if test.derived {
				want, holder = namespace+"--c", namespace+"/c"
			}
			live := &corev1.Namespace{}
			if err := hubClient.Get(t.Context(), client.ObjectKey{Name: want}, live); err != nil {
				t.Fatal(err)
			}
			if got := live.Annotations[kube.AnnotationDeliveryHolder]; delivery != want || got != holder {
				t.Errorf("delivery namespace: got %s, claimed by %q; want %s, claimed by %s", delivery, got, want, holder)
			}
		})
	}
}

func TestEstablishNewRefusesAndRepairs(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	namespace := newNamespace(t, hubClient, "taken")
	if err := hubClient.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "foreign"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := join.EstablishNew(t.Context(), hubClient, hubClient, declared(t, hubClient, namespace, "foreign")); !errors.Is(err, join.ErrForeign) {
		t.Errorf("a ServiceAccount of somebody else: got error %v, want ErrForeign", err)
	}
	cluster := declared(t, hubClient, namespace, "own")
	delivery := established(t, hubClient, cluster)
	before := versions(t, hubClient, namespace, delivery)
	annotate(t, hubClient, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: delivery}}, kube.AnnotationDeliveryHolder, nil)
	if got, err := join.EstablishNew(t.Context(), hubClient, hubClient, cluster); err != nil || got != delivery {
		t.Fatalf("objects of an earlier registration: got delivery namespace %s and error %v, want %s", got, err, delivery)
	}
	after := versions(t, hubClient, namespace, delivery)
	delete(before, "Namespace/"+delivery)
	delete(after, "Namespace/"+delivery)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("objects of an earlier registration (-before +after):\n%s", diff)
	}
}

func TestEstablishCompletesAnInterruptedEstablishNew(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	established(t, hubClient, declared(t, hubClient, newNamespace(t, hubClient, "warm"), "c"))
	for _, isFirst := range []bool{true, false} {
		for kind, effect := range requestFaults {
			t.Run(fmt.Sprintf("%s, first %t", kind, isFirst), func(t *testing.T) {
				t.Parallel()
				var want []string
				for at := int64(0); ; at++ {
					namespace := newNamespace(t, hubClient, "interrupted")
					if !isFirst {
						established(t, hubClient, declared(t, hubClient, namespace, "first"))
					}
					cluster := declared(t, hubClient, namespace, "c")
					ctx, cancel := context.WithCancel(t.Context())
					f := &faults.Fault{At: at, Effect: effect(cancel)}
					_, err := join.EstablishNew(ctx, clientOf(t, f.On(plane.Config), hubClient), hubClient, cluster)
					cancel()
					if at > 0 && f.Seen() < at {
						break // the fault was not reached
					}
					if (err == nil) != (at == 0) {
						t.Fatalf("step %d: got error %v", at, err)
					}
					delivery := established(t, hubClient, cluster)
					var objects []string
					for name := range versions(t, hubClient, namespace, delivery) {
						objects = append(objects, strings.ReplaceAll(name, namespace, "NAMESPACE"))
					}
					slices.Sort(objects)
					if at == 0 {
						want = objects
					}
					if diff := cmp.Diff(want, objects); diff != "" {
						t.Errorf("step %d (-complete +interrupted):\n%s", at, diff)
					}
				}
			})
		}
	}
}
