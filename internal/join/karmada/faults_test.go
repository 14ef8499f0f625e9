package karmada_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/localkube/faults"
)

// requestFaults are the faults of one request. Each takes the cancel function of the command.
var requestFaults = map[string]func(cancel func()) faults.Effect{
	"refused":     func(func()) faults.Effect { return faults.Refuse },
	"answer-lost": func(func()) faults.Effect { return faults.LoseResponse },
	"interrupted": func(cancel func()) faults.Effect {
		return func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
			_, _ = faults.LoseResponse(request, next)
			cancel()
			return nil, context.Canceled
		}
	},
}

func TestFailedJoinLeavesBothSidesUnchanged(t *testing.T) {
	w := alone(t)
	const name = "faulty"
	// A namespace that is there is not waited for, which makes this fast; others make their own.
	for _, hub := range []*world{w, {hubClient: w.memberClient}} {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "faulty-credentials"}}
		if err := hub.hubClient.Create(t.Context(), namespace); err != nil {
			t.Fatal(err)
		}
		if err := hub.hubClient.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: "theirs"}}); err != nil {
			t.Fatal(err)
		}
		awaitDefaults(t, hub.hubClient, namespace.Name)
	}
	run := func(hub, member *faults.Fault, ctx context.Context) error {
		r := w.joinRequest(name)
		r.ClusterNamespace = "faulty-credentials"
		r.Hub, r.Member = hub.On(w.hub.Config), member.On(w.member.Config)
		return karmada.Join(ctx, r)
	}
	hubBefore, memberBefore := ownOn(t, w.hubClient, name), everything(t, w.memberClient)
	for kind, effect := range requestFaults {
		for side := range 2 {
			for at := int64(1); ; at++ {
				ctx, cancel := context.WithCancel(t.Context())
				struck, sound := &faults.Fault{At: at, Effect: effect(cancel)}, &faults.Fault{}
				sides := [2]*faults.Fault{struck, sound}
				err := run(sides[side], sides[1-side], ctx)
				cancel()
				if err == nil {
					if at < 6 {
						t.Errorf("%s: joined after %d requests, want more", kind, at)
					}
					if err := karmada.Unjoin(t.Context(), unjoinFrom(w, name)); err != nil {
						t.Fatal(err)
					}
					break
				}
				wantSame(t, kind+" on the member: "+err.Error(), w.memberClient, memberBefore)
				wantOwn(t, w.hubClient, name, hubBefore)
			}
		}
	}
	wantSame(t, "the member in the end", w.memberClient, memberBefore)
}

// awaitDefaults waits for the objects that Kubernetes creates in every namespace.
func awaitDefaults(t *testing.T, c client.Client, namespace string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		account := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "default"}, &corev1.ServiceAccount{})
		authority := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: "kube-root-ca.crt"}, &corev1.ConfigMap{})
		return account == nil && authority == nil, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// wantOwn waits until the hub has the same objects of the cluster name as before.
func wantOwn(t *testing.T, hub client.Client, name string, before []string) {
	t.Helper()
	diff := ""
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 10*time.Second, true, func(context.Context) (bool, error) {
		diff = cmp.Diff(before, ownOn(t, hub, name))
		return diff == "", nil
	})
	if err != nil {
		t.Errorf("the hub (-before +after):\n%s", diff)
	}
}

func unjoinFrom(w *world, name string) karmada.UnjoinRequest {
	r := w.unjoinRequest(name)
	r.ClusterNamespace = "faulty-credentials"
	return r
}
