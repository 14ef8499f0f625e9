package join_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

func TestDeleteHubObjectsKeepsForeignObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "mine")
	registered(t, plane, pullRequest(n, "first"))
	registered(t, plane, pullRequest(n, "second"))
	// A user's Secret in the namespace that was made for deliveries, and a user's Role in the place of one of ours.
	users := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: n + "--second", Name: "users"}}
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "second"}}
	waiting := &libv1beta1.ConfigurationGroup{
		ObjectMeta: metav1.ObjectMeta{Namespace: n + "--second", Name: "g", Labels: map[string]string{libv1beta1.PullClusterNameLabel: "second"}},
		Spec:       libv1beta1.ConfigurationGroupSpec{Action: libv1beta1.ActionDeploy},
	}
	key := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{
		Namespace: n + "--second", Name: fleet.ContentKeySecret("second"), Labels: map[string]string{libv1beta1.PullClusterNameLabel: "second"},
	}}
	second := clusterNamed(t, hubClient, n, "second")
	for _, err := range []error{
		hubClient.Create(t.Context(), users), hubClient.Create(t.Context(), waiting), hubClient.Create(t.Context(), key),
		hubClient.Delete(t.Context(), role.DeepCopy()), hubClient.Create(t.Context(), role),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := join.DeleteHubObjects(t.Context(), hubClient, kinds(t, plane), second); err != nil {
			t.Fatal(err)
		}
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n + "--second"}}
	for _, kept := range []client.Object{users, role, namespace, second} {
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(kept), kept); err != nil || !kept.GetDeletionTimestamp().IsZero() {
			t.Errorf("%T %s is not kept: %v", kept, kept.GetName(), err)
		}
	}
	if holder := namespace.Annotations[kube.AnnotationDeliveryHolder]; holder != "" {
		t.Errorf("namespace %s is still claimed by %s", namespace.Name, holder)
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "second"}}
	for _, gone := range []client.Object{waiting, key, account} {
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(gone), gone); !apierrors.IsNotFound(err) {
			t.Errorf("%T %s is there: %v", gone, gone.GetName(), err)
		}
	}
	config, _ := agentConfig(t, registered(t, plane, pullRequest(n, "first")))
	if !allowed(t, config, "list lib.projectsveltos.io/configurationgroups "+n) {
		t.Error("the other cluster's agent lost its access")
	}
}

func TestDeregisterReportsTheReasonForTheWait(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "waits")
	registered(t, plane, pullRequest(n, "c"))
	cluster := clusterNamed(t, hubClient, n, "c")
	hold := []byte(`{"metadata":{"finalizers":["` + kube.FinalizerCluster + `"]}}`)
	if err := hubClient.Patch(t.Context(), cluster, client.RawPatch(types.MergePatchType, hold)); err != nil {
		t.Fatal(err)
	}
	inventory := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: n, Name: "sveltos--c"}}
	if err := hubClient.Create(t.Context(), inventory); err != nil {
		t.Fatal(err)
	}
	var told []string
	r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, KeepAddons: true, Wait: -1, Progress: func(text string) { told = append(told, text) }}
	_, err := join.Deregister(t.Context(), plane.Config, r)
	wantText(t, err, "no hub has started it: the deregistration continues when the hub of the shard default runs")
	if cluster = clusterNamed(t, hubClient, n, "c"); cluster.Annotations[kube.AnnotationDeregister] != kube.DeregisterKeep {
		t.Errorf("annotations are %v", cluster.Annotations)
	}

	before := cluster.DeepCopy()
	cluster.Status.FailureMessage = join.WaitingPrefix + "its agent to remove itself"
	if err := hubClient.Status().Patch(t.Context(), cluster, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	_, err = join.Deregister(t.Context(), plane.Config, r)
	wantText(t, err, "still waiting for its agent to remove itself; the deregistration continues when the cluster answers; "+
		"to leave the objects on the cluster, run the command again with --force")
	if !errors.Is(err, join.ErrStillDeregistering) || strings.Join(told, "|") != "waiting for its agent to remove itself" {
		t.Errorf("told %q, err %v", told, err)
	}
}

func TestForcedDeregisterWithoutHub(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	n := plane.Namespace(t, "nohub")
	registered(t, plane, pullRequest(n, "c"))
	cluster := clusterNamed(t, hubClient, n, "c")
	hold := []byte(`{"metadata":{"finalizers":["` + kube.FinalizerCluster + `"]}}`)
	// The last message of a hub that has stopped.
	said := []byte(`{"status":{"failureMessage":"` + join.WaitingPrefix + `its agent to remove itself"}}`)
	for _, err := range []error{
		hubClient.Patch(t.Context(), cluster, client.RawPatch(types.MergePatchType, hold)),
		hubClient.Status().Patch(t.Context(), cluster, client.RawPatch(types.MergePatchType, said)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	r := join.DeregisterRequest{Request: join.Request{Namespace: n, Name: "c"}, Force: true, Wait: -1}
	_, err := join.Deregister(t.Context(), plane.Config, r)
	wantText(t, err, "still waiting for its agent to remove itself; the deregistration continues if the hub is running")
	if !errors.Is(err, join.ErrStillDeregistering) {
		t.Errorf("err = %v", err)
	}
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("it took %s", took)
	}
	if cluster = clusterNamed(t, hubClient, n, "c"); cluster.Annotations[kube.AnnotationDeregister] != kube.DeregisterForce || cluster.DeletionTimestamp.IsZero() {
		t.Errorf("the hub is not told to go on: %v", cluster.Annotations)
	}
}
