package karmada_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/localkube/faults"
)

// ownOn lists the objects of the cluster name on the hub.
func ownOn(t *testing.T, hub client.Client, name string) []string {
	t.Helper()
	var own []string
	for key, text := range everything(t, hub) {
		if strings.Contains(key, name) || strings.HasPrefix(key, "ConfigMap karmada-cluster/cluster-id-") && strings.Contains(text, `"cluster":"`+name+`"`) {
			own = append(own, key)
		}
	}
	slices.Sort(own)
	return own
}

func TestValidateName(t *testing.T) {
	t.Parallel()
	tests := map[string]string{
		"":                      "invalid cluster name(): must be not empty",
		strings.Repeat("a", 49): "invalid cluster name(" + strings.Repeat("a", 49) + "): must be no more than 48 characters",
		"rbac-generator":        "invalid cluster name(rbac-generator): is reserved",
		"member_1":              "invalid cluster name(member_1): a lowercase RFC 1123 label",
		"member1":               "",
		strings.Repeat("a", 48): "",
	}
	for name, want := range tests {
		err := karmada.ValidateName(name)
		if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", name, err, want)
		}
	}
}

func TestJoinAndUnjoinLeaveTheMemberUnchanged(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	r := w.joinRequest("member1")
	r.Provider, r.Region, r.Zones = "local", "here", []string{"a", "b"}
	for range 2 {
		if err := karmada.Join(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		wantJoined(t, w, r)
		if err := karmada.Join(t.Context(), w.joinRequest("other")); !errors.Is(err, karmada.ErrAlreadyRegistered) {
			t.Errorf("the same member under another name: got %v, want ErrAlreadyRegistered", err)
		}
		if err := karmada.Unjoin(t.Context(), w.unjoinRequest("member1")); err != nil {
			t.Fatal(err)
		}
		wantSame(t, "the member", w.memberClient, before)
	}
	err := karmada.Unjoin(t.Context(), w.unjoinRequest("member1"))
	if want := "no cluster object member1 found in karmada control Plane"; err == nil || err.Error() != want {
		t.Errorf("unjoin once more: got %v, want %q", err, want)
	}
}

// wantJoined wants the Cluster to be as it was asked for, and its credentials to let the hub do everything.
func wantJoined(t *testing.T, w *world, r karmada.JoinRequest) {
	t.Helper()
	got := &clusterv1alpha1.Cluster{}
	if err := w.hubClient.Get(t.Context(), client.ObjectKey{Name: r.Name}, got); err != nil {
		t.Fatal(err)
	}
	want := clusterv1alpha1.ClusterSpec{
		ID: uidOf(t, w.memberClient), SyncMode: clusterv1alpha1.Push, APIEndpoint: w.member.Config.Host,
		SecretRef:             &clusterv1alpha1.LocalSecretReference{Namespace: "karmada-cluster", Name: r.Name},
		ImpersonatorSecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: "karmada-cluster", Name: r.Name + "-impersonator"},
		Provider:              r.Provider, Region: r.Region, Zones: r.Zones,
	}
	if diff := cmp.Diff(want, got.Spec); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
	for _, name := range []string{r.Name, r.Name + "-impersonator"} {
		secret := &corev1.Secret{}
		if err := w.hubClient.Get(t.Context(), client.ObjectKey{Namespace: "karmada-cluster", Name: name}, secret); err != nil {
			t.Fatal(err)
		}
		if karmada.Owner(secret) != r.Name || len(secret.Data["token"]) == 0 {
			t.Errorf("Secret %s: got %v, want a token that goes with the Cluster", name, secret.ObjectMeta)
		}
		if name != r.Name {
			continue
		}
		account, err := client.New(&rest.Config{
			Host: got.Spec.APIEndpoint, BearerToken: string(secret.Data["token"]), TLSClientConfig: rest.TLSClientConfig{CAData: secret.Data["caBundle"]},
		}, client.Options{Scheme: w.hubClient.Scheme()})
		if err != nil {
			t.Fatal(err)
		}
		if err := account.Get(t.Context(), client.ObjectKey{Name: "cluster-admin"}, &rbacv1.ClusterRole{}); err != nil {
			t.Errorf("the account of the hub: %v", err)
		}
	}
}

func uidOf(t *testing.T, reader client.Client) string {
	t.Helper()
	uid, err := join.ClusterUID(t.Context(), reader)
	if err != nil {
		t.Fatal(err)
	}
	return uid
}

func TestDryRunWritesNothing(t *testing.T) {
	w := alone(t)
	counted := &faults.Fault{Effect: faults.Refuse}
	r := w.joinRequest("dry")
	r.Hub, r.Member, r.DryRun = counted.On(w.hub.Config), counted.On(w.member.Config), true
	start := time.Now()
	if err := karmada.Join(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if n, took := counted.Seen(), time.Since(start); n > 0 || took > 10*time.Second {
		t.Errorf("got %d writing requests in %s, want none at once", n, took)
	}
}

func TestUnjoinKeepsTheRegistrationOfAnotherHub(t *testing.T) {
	w := alone(t)
	before := everything(t, w.memberClient)
	if err := karmada.Join(t.Context(), w.joinRequest("shared")); err != nil {
		t.Fatal(err)
	}
	// The member is the other hub, too.
	other := karmada.JoinRequest{Hub: w.member.Config, Member: w.member.Config, Name: "shared"}
	err := karmada.Join(t.Context(), other)
	if want := "was joined to another hub as shared; choose another name"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the same name on another hub: got %v, want %q", err, want)
	}
	other.Name = "shared-too"
	if err := karmada.Join(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := karmada.Unjoin(t.Context(), w.unjoinRequest("shared")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"karmada-shared-too", "karmada-impersonator"} {
		if err := w.memberClient.Get(t.Context(), client.ObjectKey{Namespace: "karmada-cluster", Name: name}, &corev1.Secret{}); err != nil {
			t.Errorf("what the other hub uses: %v", err)
		}
	}
	gone := &corev1.ServiceAccount{}
	if err := w.memberClient.Get(t.Context(), client.ObjectKey{Namespace: "karmada-cluster", Name: "karmada-shared"}, gone); !apierrors.IsNotFound(err) {
		t.Errorf("the account of the hub that left: got %v, want not found", err)
	}
	// A namespace in which others have something stays, and is nobody's then.
	theirs := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "theirs"}}
	if err := w.memberClient.Create(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	last := w.unjoinRequest("shared-too")
	last.Hub = w.member.Config
	if err := karmada.Unjoin(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	if err := w.memberClient.Get(t.Context(), client.ObjectKeyFromObject(theirs), theirs); err != nil {
		t.Errorf("what others have in the namespace: %v", err)
	}
	if err := w.memberClient.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "karmada-cluster"}}); err != nil {
		t.Fatal(err)
	}
	wantSame(t, "the member", w.memberClient, before)
}

func TestForcedUnjoinWithoutHub(t *testing.T) {
	t.Parallel()
	w := planes(t)
	c := cluster("held", "held")
	c.Spec.SyncMode, c.Finalizers = clusterv1alpha1.Push, []string{clusterv1alpha1.ClusterFinalizer}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "karmada-es-held"}}
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: space.Name, Name: "w", Finalizers: []string{workv1alpha1.ExecutionFinalizer}}}
	for _, obj := range []client.Object{c, space, work} {
		if err := w.hubClient.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	r := karmada.UnjoinRequest{Hub: w.hub.Config, Name: "held", Timeout: time.Second, Progress: func(string) {}}
	if err := karmada.Unjoin(t.Context(), r); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without force: got %v, want a deadline", err)
	}
	r.Force = true
	if err := karmada.Unjoin(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if own := ownOn(t, w.hubClient, "karmada-es-held"); len(own) > 0 {
		live := &corev1.Namespace{}
		if err := w.hubClient.Get(t.Context(), client.ObjectKeyFromObject(space), live); err == nil && live.DeletionTimestamp.IsZero() {
			t.Errorf("left: %v", own)
		}
	}
	pull := cluster("pulling", "pulling")
	if err := w.hubClient.Create(t.Context(), pull); err != nil {
		t.Fatal(err)
	}
	err := karmada.Unjoin(t.Context(), karmada.UnjoinRequest{Hub: w.hub.Config, Name: "pulling"})
	want := "cluster pulling is a Pull mode member cluster, please use command `unregister` if you want to continue unregistering the cluster"
	if err == nil || err.Error() != want {
		t.Errorf("a cluster in pull mode: got %v, want %q", err, want)
	}
}
