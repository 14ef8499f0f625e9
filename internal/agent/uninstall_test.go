package agent_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// hold adds the hub's finalizer to the cluster object.
func (w *world) hold() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"finalizers":["` + kube.FinalizerCluster + `"]}}`)
}

// order gives the hub's order to the agent.
func (w *world) order() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentOrder + `":"` + kube.AgentOrderRemove + `"}}}`)
}

func (w *world) patchCluster(patch string) {
	w.t.Helper()
	if err := w.hubClient.Patch(w.t.Context(), w.sveltosCluster(), client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) deleteCluster() {
	w.t.Helper()
	if err := w.hubClient.Delete(w.t.Context(), w.sveltosCluster()); err != nil {
		w.t.Fatal(err)
	}
}

// connected waits until the agent has reported.
func (w *world) connected() {
	w.t.Helper()
	w.eventually("the agent reports", func(context.Context) error {
		if !w.sveltosCluster().Status.Ready {
			return errors.New("it has not")
		}
		return nil
	})
}

func (w *world) wantEnd(ended <-chan struct{}) {
	w.t.Helper()
	w.eventually("the agent ends", func(context.Context) error {
		select {
		case <-ended:
			return nil
		default:
			return errors.New("it runs")
		}
	})
}

// wantRemoved waits until nothing of manifest is on the member, and no object that Kubernetes made for it.
func (w *world) wantRemoved(manifest []*unstructured.Unstructured) {
	w.t.Helper()
	w.eventually("the agent is removed", func(ctx context.Context) error {
		for _, obj := range manifest {
			live := &unstructured.Unstructured{}
			live.SetGroupVersionKind(obj.GroupVersionKind())
			if err := w.client.Get(ctx, client.ObjectKeyFromObject(obj), live); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s %s is there: %w", obj.GetKind(), obj.GetName(), err)
			}
		}
		pods := &corev1.PodList{}
		if err := w.client.List(ctx, pods, client.InNamespace(kube.AgentNamespace)); err != nil || len(pods.Items) > 0 {
			return fmt.Errorf("%d pods are there: %w", len(pods.Items), err)
		}
		return nil
	})
}

// next goes on with another cluster of that name on the same member.
func (w *world) next(name string) []*unstructured.Unstructured {
	w.t.Helper()
	// The world's own registration is of no use here, and its Secret would be another cluster's.
	first := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret("c1")}}
	if err := w.client.Delete(w.t.Context(), first); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	w.cluster.Name = name
	manifest := w.manifest()
	w.apply(manifest)
	w.hold()
	return manifest
}

func TestAgentRemovesItselfWhereverItIsInterrupted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	front := w.stand()
	finished := false
	for writes := 0; !finished; writes++ {
		if writes > 12 {
			t.Fatal("the removal takes more writes than it should")
		}
		manifest := w.next(fmt.Sprintf("cut%d", writes))
		cut := newBreaker(writes)
		ended, stop := w.runAgent(t.Context(), cut.wrap(w.member.Config))
		w.connected()
		w.deleteCluster()
		cut.arm()
		w.order()
		select {
		case <-cut.broken:
			t.Logf("cut off after %d writes", writes)
		case <-ended:
			finished = true
		case <-time.After(time.Minute):
			t.Fatalf("nothing happened with %d writes", writes)
		}
		stop()
		if !finished {
			ended, _ = w.runAgent(t.Context(), w.member.Config)
			w.wantEnd(ended)
		}
		w.wantRemoved(manifest)
		if w.sveltosCluster().Status.AgentRemovedAt == nil {
			t.Errorf("cut off after %d writes: the hub was not told", writes)
		}
	}

	// The telling is lost, or its answer is: the agent tells again.
	for name, lost := range map[string]fate{"before": lostBefore, "after": lostAfter} {
		manifest := w.next(name)
		ended, _ := w.runAgent(t.Context(), w.member.Config)
		w.connected()
		w.deleteCluster()
		lose := 1
		front.losing(func(r *http.Request) fate {
			if lose == 0 || r.Method != http.MethodPatch || !strings.HasSuffix(r.URL.Path, "/sveltosclusters/"+name+"/status") {
				return arrives
			}
			lose--
			return lost
		})
		w.order()
		w.wantEnd(ended)
		w.wantRemoved(manifest)
		if w.sveltosCluster().Status.AgentRemovedAt == nil {
			t.Errorf("telling lost %s the hub: it was not told", name)
		}
		front.losing(nil)
	}
}

// cutBeforeRemoval stops an agent that has prepared everything and not removed itself yet; the hub ends the
// deregistration meanwhile.
func (w *world) cutBeforeRemoval() {
	w.t.Helper()
	cut := newBreaker(6) // four dependents, the Namespace and the Secret
	ended, stop := w.runAgent(w.t.Context(), cut.wrap(w.member.Config))
	w.connected()
	w.deleteCluster()
	cut.arm()
	w.order()
	select {
	case <-cut.broken:
	case <-ended:
		w.t.Fatal("the agent removed itself with fewer writes than it should need")
	case <-time.After(time.Minute):
		w.t.Fatal("the agent did nothing")
	}
	stop()
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
}

func TestLeavingAgentNeedsNoHubThatForgotIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.next("forgotten")
	w.cutBeforeRemoval()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.wantEnd(ended)
	w.wantRemoved(manifest)
}

func TestAgentStaysWhenItIsRegisteredAgainWhileLeaving(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.next("back")
	w.cutBeforeRemoval()
	w.eventually("the cluster object is gone", func(ctx context.Context) error {
		if err := w.hubClient.Get(ctx, w.cluster, &libv1beta1.SveltosCluster{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	manifest := w.manifest()
	w.apply(manifest)
	w.startAgent()
	w.connected()
	w.wantUntouched(manifest)
}

// wantUntouched wants the agent's objects to be there, and no departure to be begun.
func (w *world) wantUntouched(manifest []*unstructured.Unstructured) {
	w.t.Helper()
	for _, obj := range manifest {
		live := &unstructured.Unstructured{}
		live.SetGroupVersionKind(obj.GroupVersionKind())
		if err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(obj), live); err != nil {
			w.t.Error(err)
		}
		if len(live.GetOwnerReferences()) > 0 || live.GetAnnotations()["towline.dev/departing"] != "" || live.GetDeletionTimestamp() != nil {
			w.t.Errorf("%s %s: %v", live.GetKind(), live.GetName(), live.Object["metadata"])
		}
	}
}

// settle gives the agent the time to do what it must not do: nothing can be waited for when nothing is to happen.
func (w *world) settle() {
	w.t.Helper()
	never, cancel := context.WithTimeout(w.t.Context(), 2*time.Second)
	defer cancel()
	<-never.Done()
}

func TestAgentRemovesNothingWithoutAnOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.next("c1")
	w.startAgent()
	w.deliver(bundleOf("one", "kept"), bundle.StateApplied)

	// An order that stands on a cluster object that nobody deletes.
	w.order()
	w.settle()
	w.wantUntouched(manifest)
	// A deletion without an order.
	w.patchCluster(`{"metadata":{"annotations":null}}`)
	w.deleteCluster()
	w.settle()
	w.wantUntouched(manifest)
	// The cluster object vanishes.
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
	w.settle()
	w.wantUntouched(manifest)
	// It is made again, by somebody else.
	again := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: w.cluster.Name}}
	again.Spec.PullMode = true
	if err := w.hubClient.Create(t.Context(), again); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.wantUntouched(manifest)
	w.wantValue("kept", "one")
}

func TestLeavingAgentTakesOnlyItsOwn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.next("c1")
	pull := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "pull"}}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "somebodys", Labels: map[string]string{"app.kubernetes.io/name": "sveltos-applier"}}}
	for _, obj := range []client.Object{pull, role} {
		if err := w.client.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	// What is still deployed at the order stays, and the record of it.
	w.deliver(bundleOf("one", "kept"), bundle.StateApplied)
	w.deleteCluster()
	w.order()
	w.wantEnd(ended)
	w.wantRemoved(manifest[1:])
	w.settle()
	for _, obj := range []client.Object{pull, role, configMap("kept")} {
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil || len(obj.GetOwnerReferences()) > 0 {
			t.Errorf("%T: error %v, metadata %v", obj, err, obj.GetOwnerReferences())
		}
	}
	namespace := &corev1.Namespace{}
	if err := w.client.Get(t.Context(), client.ObjectKey{Name: kube.AgentNamespace}, namespace); err != nil || namespace.DeletionTimestamp != nil {
		t.Errorf("namespace with objects of others: error %v, deleted %v", err, namespace.DeletionTimestamp)
	}
	records := &corev1.SecretList{}
	if err := w.client.List(t.Context(), records, client.InNamespace(kube.AgentNamespace)); err != nil || len(records.Items) < 2 {
		t.Errorf("records: %d Secrets and error %v, want them kept", len(records.Items), err)
	}
}

func TestLeavingAgentLeavesAnotherClustersAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.next("first")
	_, stop := w.runAgent(t.Context(), w.member.Config)
	w.connected()
	stop()
	first := w.cluster
	manifest := w.next("second")
	w.cluster = first
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deleteCluster()
	w.order()
	w.wantEnd(ended)
	w.wantUntouched(manifest)
	secret := client.ObjectKey{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret("first")}
	if err := w.client.Get(t.Context(), secret, &corev1.Secret{}); !apierrors.IsNotFound(err) {
		t.Errorf("the agent's own Secret: got error %v, want it gone", err)
	}
}

func TestAgentByHandRemovesItself(t *testing.T) {
	t.Parallel()
	w := newWorld(t) // applies no more than Namespace and Secret
	w.hold()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	// Withdrawn although the cluster is paused, for it is being deregistered.
	w.pause(true)
	w.deleteCluster()
	w.withdraw(id)
	w.wantGone("a")
	w.order()
	w.wantEnd(ended)
	w.eventually("the namespace is gone", func(ctx context.Context) error {
		err := w.client.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, &corev1.Namespace{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	if err := w.client.Get(t.Context(), client.ObjectKey{Name: "sveltos-applier-manager-role"}, &rbacv1.ClusterRole{}); !apierrors.IsNotFound(err) {
		t.Errorf("ClusterRole: got error %v, want it gone", err)
	}
}
