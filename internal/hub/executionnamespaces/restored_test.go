package executionnamespaces_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

func TestRestoredHubKeepsExecutionNamespaces(t *testing.T) {
	t.Parallel()
	w := sharedEnv(t)
	// The execution namespace has an annotation with the UID of its Cluster.
	tests := map[string]struct {
		annotations map[string]string
		stays       bool
	}{
		"restored-same":    {map[string]string{kube.AnnotationClusterID: "restored-same"}, true},
		"restored-unknown": {nil, true},
		"restored-other":   {map[string]string{kube.AnnotationClusterID: "another"}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "karmada-es-" + name, Annotations: test.annotations}}
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
			claim := &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "cluster-id-" + name}, Data: map[string]string{"cluster": name, "id": name},
			}
			home := &corev1.Namespace{ObjectMeta: named("karmada-cluster")}
			if err := client.IgnoreAlreadyExists(w.hubClient.Create(t.Context(), home)); err != nil {
				t.Fatal(err)
			}
			for _, obj := range []client.Object{space, secret, claim} {
				karmada.SetOwnerLabels(obj, name)
				if err := w.hubClient.Create(t.Context(), obj); err != nil {
					t.Fatal(err)
				}
			}
			work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: space.Name, Name: "w"}}
			c := &clusterv1alpha1.Cluster{ObjectMeta: named(name), Spec: clusterv1alpha1.ClusterSpec{
				ID: name, SyncMode: clusterv1alpha1.Push, SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: "default", Name: name},
			}}
			// Creation timestamps have whole seconds, and the namespace must be older than the Cluster.
			<-time.After(1100 * time.Millisecond)
			for _, obj := range []client.Object{work, c} {
				if err := w.hubClient.Create(t.Context(), obj); err != nil {
					t.Fatal(err)
				}
			}
			formerUID, kept := space.UID, []client.Object{secret, claim}
			w.awaitReady(t, name)
			eventually(t, "the ID of "+name, func() bool {
				return w.exists(t, w.hubClient, space) && space.DeletionTimestamp.IsZero() && space.Annotations[kube.AnnotationClusterID] == name
			})
			for _, obj := range kept {
				uid := obj.GetUID()
				if !w.exists(t, w.hubClient, obj) || obj.GetUID() != uid {
					t.Errorf("%T was deleted or created again", obj)
				}
			}
			if !w.exists(t, w.hubClient, space) || (space.UID == formerUID) != test.stays || space.Annotations[kube.AnnotationClusterID] != name {
				t.Errorf("execution namespace: kept %t, want %t; annotations %v", space.UID == formerUID, test.stays, space.Annotations)
			}
			if got := w.exists(t, w.hubClient, work); got != test.stays {
				t.Errorf("the Work exists: %t, want %t", got, test.stays)
			}
		})
	}
}
