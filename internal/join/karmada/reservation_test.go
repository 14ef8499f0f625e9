package karmada_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/localkube/faults"
)

const attempts = 100

func cluster(name, id string) *clusterv1alpha1.Cluster {
	return &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: clusterv1alpha1.ClusterSpec{ID: id, SyncMode: clusterv1alpha1.Pull},
	}
}

// startingWith lists the Clusters and the claims that a test made, whose names and ids all begin with prefix.
func startingWith(t *testing.T, hub client.Client, prefix string) (clusters []clusterv1alpha1.Cluster, claims []corev1.ConfigMap) {
	t.Helper()
	var all clusterv1alpha1.ClusterList
	var maps corev1.ConfigMapList
	if err := errors.Join(hub.List(t.Context(), &all), hub.List(t.Context(), &maps, client.InNamespace("karmada-cluster"))); err != nil {
		t.Fatal(err)
	}
	for _, c := range all.Items {
		if strings.HasPrefix(c.Name, prefix) {
			clusters = append(clusters, c)
		}
	}
	for _, m := range maps.Items {
		if strings.HasPrefix(m.Name, "cluster-id-"+prefix) {
			claims = append(claims, m)
		}
	}
	return clusters, claims
}

func TestConcurrentCreateClusterHasOneWinner(t *testing.T) {
	t.Parallel()
	w := planes(t)
	tests := map[string]func(i int) (name, id string){
		"one-id":   func(i int) (string, string) { return fmt.Sprintf("one-id-%d", i), "one-id" },
		"one-name": func(i int) (string, string) { return "one-name", fmt.Sprintf("one-name-%d", i) },
		"both-one": func(int) (string, string) { return "both-one", "both-one" },
	}
	for prefix, identity := range tests {
		t.Run(prefix, func(t *testing.T) {
			t.Parallel()
			var racing sync.WaitGroup
			errs := make([]error, attempts)
			for i := range attempts {
				racing.Go(func() { errs[i] = karmada.CreateCluster(t.Context(), w.hubClient, cluster(identity(i))) })
			}
			racing.Wait()
			winner := -1
			for i, err := range errs {
				name, id := identity(i)
				want := fmt.Sprintf("the cluster ID %s or the cluster name %s has been registered", id, name)
				switch {
				case err == nil && winner < 0:
					winner = i
				case err == nil:
					t.Errorf("both %d and %d won", winner, i)
				case !errors.Is(err, karmada.ErrAlreadyRegistered) || err.Error() != want:
					t.Errorf("attempt %d: got %v, want %q", i, err, want)
				}
			}
			if winner < 0 {
				t.Fatal("nobody won")
			}
			name, id := identity(winner)
			clusters, claims := startingWith(t, w.hubClient, prefix)
			if len(clusters) != 1 || clusters[0].Name != name || clusters[0].Spec.ID != id {
				t.Errorf("clusters: got %v, want %s alone", clusters, name)
			}
			if len(claims) != 1 || karmada.Owner(&claims[0]) != clusters[0].Name {
				t.Errorf("claims: got %v, want one claim of the created Cluster", claims)
			}
		})
	}
}

// A process that is killed after its first request leaves a Cluster without a reservation.
func TestKilledCreateClusterCanBeRepeated(t *testing.T) {
	t.Parallel()
	w := planes(t)
	cutOff := cluster("cut-1", "cut")
	if err := w.hubClient.Create(t.Context(), cutOff); err != nil {
		t.Fatal(err)
	}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, cluster("cut-1", "cut")); !errors.Is(err, karmada.ErrAlreadyRegistered) {
		t.Errorf("the same name: got %v, want ErrAlreadyRegistered", err)
	}
	if err := karmada.ReserveID(t.Context(), w.hubClient, cutOff); err != nil {
		t.Errorf("the same Cluster again: got %v, want it to go on", err)
	}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, cluster("cut-2", "cut")); !errors.Is(err, karmada.ErrAlreadyRegistered) {
		t.Errorf("another name: got %v, want ErrAlreadyRegistered", err)
	}
	clusters, claims := startingWith(t, w.hubClient, "cut")
	if len(clusters) != 1 || len(claims) != 1 || karmada.Owner(&claims[0]) != clusters[0].Name {
		t.Errorf("got clusters %v and claims %v, want one each", clusters, claims)
	}
	// A reservation for a Cluster that does not exist.
	claims[0].ObjectMeta = metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "cluster-id-cut-none"}
	claims[0].Data = map[string]string{"cluster": "cut-none", "id": "cut-none"}
	if err := w.hubClient.Create(t.Context(), &claims[0]); err != nil {
		t.Fatal(err)
	}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, cluster("cut-3", "cut-none")); err != nil {
		t.Errorf("the ID of a Cluster that does not exist: %v", err)
	}
}

func TestDeletedClusterReleasesItsID(t *testing.T) {
	t.Parallel()
	w := planes(t)
	for _, name := range []string{"again-1", "again-2"} {
		c := cluster(name, "again")
		if err := karmada.CreateCluster(t.Context(), w.hubClient, c); err != nil {
			t.Fatalf("%s, after the one before was deleted: %v", name, err)
		}
		if err := w.hubClient.Delete(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReserveIDOfClustersCreatedByHand(t *testing.T) {
	t.Parallel()
	w := planes(t)
	first, second := cluster("hand-1", "hand"), cluster("hand-2", "hand")
	for _, c := range []*clusterv1alpha1.Cluster{first, second} {
		if err := w.hubClient.Create(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := karmada.ReserveID(t.Context(), w.hubClient, first); err != nil {
			t.Error(err)
		}
		if err := karmada.ReserveID(t.Context(), w.hubClient, second); !errors.Is(err, karmada.ErrAlreadyRegistered) {
			t.Errorf("the second: got %v, want ErrAlreadyRegistered", err)
		}
	}
	if err := karmada.CreateCluster(t.Context(), w.hubClient, cluster("hand-3", "hand")); !errors.Is(err, karmada.ErrAlreadyRegistered) {
		t.Errorf("a registration: got %v, want ErrAlreadyRegistered", err)
	}
}

func TestFailedCreateClusterLeavesNothing(t *testing.T) {
	t.Parallel()
	w := planes(t)
	for kind, effect := range requestFaults {
		for at := int64(1); ; at++ {
			ctx, cancel := context.WithCancel(t.Context())
			f := &faults.Fault{At: at, Effect: effect(cancel)}
			hub, err := client.New(f.On(w.hub.Config), client.Options{Scheme: w.hubClient.Scheme()})
			if err != nil {
				t.Fatal(err)
			}
			c := cluster("torn", "torn")
			err = karmada.CreateCluster(ctx, hub, c)
			cancel()
			if err == nil {
				if err := errors.Join(w.hubClient.Delete(t.Context(), c), karmada.DeleteHubObjects(t.Context(), w.hubClient, c)); err != nil {
					t.Fatal(err)
				}
				break
			}
			clusters, claims := startingWith(t, w.hubClient, "torn")
			if len(clusters) > 0 || len(claims) > 0 {
				t.Errorf("%s at %d (%v): left %v, %v", kind, at, err, clusters, claims)
			}
		}
	}
}
