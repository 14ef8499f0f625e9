package rollback_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/faults"
)

// cluster is a namespace of a control plane.
type cluster struct {
	config    *rest.Config
	client    client.Client
	namespace string
}

func newCluster(t *testing.T) cluster {
	t.Helper()
	plane := localkube.Shared(t)
	return cluster{plane.Config, newClient(t, plane.Config), plane.Namespace(t, "rollback")}
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c cluster) configMap(data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: "object"}, Data: data}
}

func (c cluster) create(t *testing.T, data map[string]string) {
	t.Helper()
	if err := c.client.Create(t.Context(), c.configMap(data), client.FieldOwner("somebody")); err != nil {
		t.Fatal(err)
	}
}

// data returns the data of the object, or nil if it does not exist.
func (c cluster) data(t *testing.T) map[string]string {
	t.Helper()
	live := c.configMap(nil)
	if err := c.client.Get(t.Context(), client.ObjectKeyFromObject(live), live); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		t.Fatal(err)
	}
	return live.Data
}

// apply applies data with another run.
func (c cluster) apply(t *testing.T, attempt string, data map[string]string) {
	t.Helper()
	if _, _, err := rollback.New(c.client, attempt).Apply(t.Context(), c.configMap(data), nil); err != nil {
		t.Fatal(err)
	}
}

func TestRollBackLeavesTheClusterAsItWas(t *testing.T) {
	t.Parallel()
	old, desired := map[string]string{"a": "old", "b": "b"}, map[string]string{"a": "new", "c": "c"}
	for name, c := range map[string]struct {
		before map[string]string // nil: no object
		effect faults.Effect     // on the first request that writes
		meanwhile,
		want map[string]string
		result rollback.Result
	}{
		"created":                        {result: rollback.Created},
		"created, and the response lost": {effect: faults.LoseResponse},
		"created, by another run since":  {meanwhile: map[string]string{"a": "theirs"}, want: map[string]string{"a": "theirs", "c": "c"}, result: rollback.Created},
		"refused":                        {before: old, effect: faults.Forbid, want: old},
		"changed":                        {before: old, want: old, result: rollback.Configured},
		"changed, and the response lost": {before: old, effect: faults.LoseResponse, want: old},
		"changed, by another run since":  {before: old, meanwhile: map[string]string{"a": "theirs"}, want: map[string]string{"a": "theirs", "b": "b"}, result: rollback.Configured},
		"unchanged":                      {before: map[string]string{"a": "new", "c": "c"}, want: desired, result: rollback.Unchanged},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newCluster(t)
			if c.before != nil {
				k.create(t, c.before)
			}
			fault := &faults.Fault{At: 1, Effect: c.effect}
			if c.effect == nil {
				fault.At = 0
			}
			writer := rollback.New(newClient(t, fault.On(k.config)), "mine")
			_, result, err := writer.Apply(t.Context(), k.configMap(desired), nil)
			if result != c.result || (err == nil) != (c.effect == nil) {
				t.Errorf("got result %q and error %v, want %q", result, err, c.result)
			}
			if c.meanwhile != nil {
				k.apply(t, "theirs", c.meanwhile)
			}
			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			if err := writer.RollBack(cancelled); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(c.want, k.data(t)); diff != "" {
				t.Errorf("object (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRollBackRestoresOnlyFieldsThatItChanged(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	k.create(t, map[string]string{"a": "old", "b": "old"})
	writer := rollback.New(k.client, "mine")
	for _, data := range []map[string]string{{"a": "first", "b": "new"}, {"a": "new"}} {
		if _, _, err := writer.Apply(t.Context(), k.configMap(data), nil); err != nil {
			t.Fatal(err)
		}
	}
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"data":{"c":"theirs"},"metadata":{"labels":{"theirs":"x"}}}`))
	live := k.configMap(nil)
	if err := k.client.Patch(t.Context(), live, patch); err != nil {
		t.Fatal(err)
	}
	if err := writer.RollBack(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "old", "b": "old", "c": "theirs"}, k.data(t)); diff != "" {
		t.Errorf("data (-want +got):\n%s", diff)
	}
	if err := k.client.Get(t.Context(), client.ObjectKeyFromObject(live), live); err != nil {
		t.Fatal(err)
	}
	if live.Labels["theirs"] != "x" || live.Annotations[rollback.AttemptAnnotation] != "" {
		t.Errorf("got labels %v and annotations %v, want their label and no attempt", live.Labels, live.Annotations)
	}
}

func TestApplyDoesNotChangeAnObjectThatCheckRefuses(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	k.create(t, map[string]string{"a": "theirs"})
	refused := errors.New("not ours")
	writer := rollback.New(k.client, "mine")
	_, _, err := writer.Apply(t.Context(), k.configMap(map[string]string{"a": "ours"}), func(live *unstructured.Unstructured) error {
		if live.GetName() != "object" {
			t.Errorf("check: got %s", live.GetName())
		}
		return refused
	})
	if !errors.Is(err, refused) {
		t.Errorf("got error %v, want that of check", err)
	}
	if err := writer.RollBack(t.Context()); err != nil {
		t.Error(err)
	}
	if got := k.data(t)["a"]; got != "theirs" {
		t.Errorf("got %q, want the object as it was", got)
	}
}

func TestApplyRefusesAnObjectThatIsBeingDeleted(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	held := k.configMap(nil)
	held.Finalizers = []string{"towline.dev/test"}
	if err := errors.Join(k.client.Create(t.Context(), held), k.client.Delete(t.Context(), held)); err != nil {
		t.Fatal(err)
	}
	_, _, err := rollback.New(k.client, "mine").Apply(t.Context(), k.configMap(nil), nil)
	if !errors.Is(err, rollback.ErrBeingDeleted) {
		t.Errorf("got error %v, want ErrBeingDeleted", err)
	}
}

func TestApplyWithoutAttemptWritesOnlyDifferences(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	k.apply(t, "theirs", map[string]string{"a": "a"})
	fault := &faults.Fault{}
	writer := rollback.New(newClient(t, fault.On(k.config)), "")
	for i, want := range []rollback.Result{rollback.Unchanged, rollback.Configured, rollback.Unchanged} {
		live, result, err := writer.Apply(t.Context(), k.configMap(map[string]string{"a": []string{"a", "b", "b"}[i]}), nil)
		if err != nil || result != want {
			t.Fatalf("apply %d: got result %q and error %v, want %q", i, result, err, want)
		}
		if got := live.GetAnnotations()[rollback.AttemptAnnotation]; got != "theirs" {
			t.Errorf("attempt: got %q, want that of the run that made the object", got)
		}
	}
	if fault.Seen() != 1 {
		t.Errorf("got %d write requests, want one", fault.Seen())
	}
	if err := writer.RollBack(t.Context()); err != nil || k.data(t)["a"] != "b" {
		t.Errorf("after RollBack: got %v and error %v, want no change", k.data(t), err)
	}
}

func TestRollBackContinuesAfterAFailure(t *testing.T) {
	t.Parallel()
	k := newCluster(t)
	failure := errors.New("not this one")
	writer := rollback.New(k.client, "mine")
	if _, _, err := writer.Apply(t.Context(), k.configMap(nil), nil); err != nil {
		t.Fatal(err)
	}
	order := []string{}
	for _, name := range []string{"first", "second"} {
		writer.AddUndo(func(context.Context) error {
			order = append(order, name)
			return failure
		})
	}
	if err := writer.RollBack(t.Context()); !errors.Is(err, failure) {
		t.Errorf("got error %v, want the failure", err)
	}
	if diff := cmp.Diff([]string{"second", "first"}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
	if err := k.client.Get(t.Context(), client.ObjectKeyFromObject(k.configMap(nil)), &corev1.ConfigMap{}); !apierrors.IsNotFound(err) {
		t.Errorf("got error %v, want that the object does not exist", err)
	}
}
