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

// addFinalizer adds the hub's finalizer to the cluster object.
func (w *world) addFinalizer() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"finalizers":["` + kube.FinalizerCluster + `"]}}`)
}

// requestRemoval writes the hub's removal request.
func (w *world) requestRemoval() {
	w.t.Helper()
	w.patchCluster(`{"metadata":{"annotations":{"` + kube.AnnotationAgentRequest + `":"` + kube.AgentRequestRemove + `"}}}`)
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

// wantReady waits until the agent has reported.
func (w *world) wantReady() {
	w.t.Helper()
	w.eventually("the agent reports", func(context.Context) error {
		if !w.sveltosCluster().Status.Ready {
			return errors.New("it has not")
		}
		return nil
	})
}

func (w *world) wantEnded(ended <-chan struct{}) {
	w.t.Helper()
	w.eventually("the agent ends", func(context.Context) error {
		select {
		case <-ended:
			return nil
		default:
			return errors.New("it is running")
		}
	})
}

// wantRemoved waits until the member has no object of manifest, and no Pods.
func (w *world) wantRemoved(manifest []*unstructured.Unstructured) {
	w.t.Helper()
	w.eventually("the agent is removed", func(ctx context.Context) error {
		for _, obj := range manifest {
			live := &unstructured.Unstructured{}
			live.SetGroupVersionKind(obj.GroupVersionKind())
			if err := w.client.Get(ctx, client.ObjectKeyFromObject(obj), live); !apierrors.IsNotFound(err) {
				return fmt.Errorf("%s %s exists: %w", obj.GetKind(), obj.GetName(), err)
			}
		}
		pods := &corev1.PodList{}
		if err := w.client.List(ctx, pods, client.InNamespace(kube.AgentNamespace)); err != nil || len(pods.Items) > 0 {
			return fmt.Errorf("%d pods exist: %w", len(pods.Items), err)
		}
		return nil
	})
}

// registerNext registers the same member under another name.
func (w *world) registerNext(name string) []*unstructured.Unstructured {
	w.t.Helper()
	// The first registration is not used, and its Secret would be foreign.
	first := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret("c1")}}
	if err := w.client.Delete(w.t.Context(), first); client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	w.cluster.Name = name
	manifest := w.manifest()
	w.apply(manifest)
	w.addFinalizer()
	return manifest
}

func TestInterruptedUninstall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	proxy := w.startHubProxy()
	finished := false
	for writes := 0; !finished; writes++ {
		if writes > 12 {
			t.Fatal("the removal needs too many writes")
		}
		manifest := w.registerNext(fmt.Sprintf("cut%d", writes))
		limiter := newWriteLimiter(writes)
		ended, stop := w.runAgent(t.Context(), limiter.wrap(w.member.Config))
		w.wantReady()
		w.deleteCluster()
		limiter.activate()
		w.requestRemoval()
		select {
		case <-limiter.refused:
			t.Logf("cut off after %d writes", writes)
		case <-ended:
			finished = true
		case <-time.After(time.Minute):
			t.Fatalf("the agent has not begun the uninstallation with %d writes", writes)
		}
		stop()
		if !finished {
			ended, _ = w.runAgent(t.Context(), w.member.Config)
			w.wantEnded(ended)
		}
		w.wantRemoved(manifest)
		if w.sveltosCluster().Status.AgentRemovedAt == nil {
			t.Errorf("interrupted after %d writes: the hub has no confirmation", writes)
		}
	}

	// The confirmation or the response to it is lost. The agent confirms again.
	for name, lost := range map[string]outcome{"before": requestLost, "after": responseLost} {
		manifest := w.registerNext(name)
		ended, _ := w.runAgent(t.Context(), w.member.Config)
		w.wantReady()
		w.deleteCluster()
		left := 1
		proxy.setDecision(func(r *http.Request) outcome {
			if left == 0 || r.Method != http.MethodPatch || !strings.HasSuffix(r.URL.Path, "/sveltosclusters/"+name+"/status") {
				return isForwarded
			}
			left--
			return lost
		})
		w.requestRemoval()
		w.wantEnded(ended)
		w.wantRemoved(manifest)
		if w.sveltosCluster().Status.AgentRemovedAt == nil {
			t.Errorf("confirmation lost %s the hub: the hub has no confirmation", name)
		}
		proxy.setDecision(nil)
	}
}

// interruptBeforeRemoval stops an agent after it has prepared its uninstallation, and finishes the deregistration on
// the hub.
func (w *world) interruptBeforeRemoval() {
	w.t.Helper()
	limiter := newWriteLimiter(6) // four dependents, the Namespace and the Secret
	ended, stop := w.runAgent(w.t.Context(), limiter.wrap(w.member.Config))
	w.wantReady()
	w.deleteCluster()
	limiter.activate()
	w.requestRemoval()
	select {
	case <-limiter.refused:
	case <-ended:
		w.t.Fatal("the agent needed too few writes for its removal")
	case <-time.After(time.Minute):
		w.t.Fatal("the agent did not begin its removal")
	}
	stop()
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
}

func TestUninstallAfterTheHubDeletedTheCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.registerNext("forgotten")
	w.interruptBeforeRemoval()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.wantEnded(ended)
	w.wantRemoved(manifest)
}

func TestRegistrationDuringUninstallKeepsTheAgent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.registerNext("back")
	w.interruptBeforeRemoval()
	w.eventually("the SveltosCluster is deleted", func(ctx context.Context) error {
		if err := w.hubClient.Get(ctx, w.cluster, &libv1beta1.SveltosCluster{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the object exists: %w", err)
		}
		return nil
	})
	manifest := w.manifest()
	w.apply(manifest)
	w.startAgent()
	w.wantReady()
	w.wantUntouched(manifest)
}

// wantUntouched verifies that the agent's objects exist, and that no uninstallation has begun.
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

// letPass waits, so that an unwanted action of the agent can happen.
func (w *world) letPass(pause time.Duration) {
	w.t.Helper()
	timeout, cancel := context.WithTimeout(w.t.Context(), pause)
	defer cancel()
	<-timeout.Done()
}

func TestNoUninstallWithoutRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.registerNext("c1")
	w.startAgent()
	w.deliver(bundleOf("one", "kept"), bundle.StateApplied)

	// A removal request on a SveltosCluster that is not being deleted.
	w.requestRemoval()
	w.letPass(2 * time.Second)
	w.wantUntouched(manifest)
	// A deletion without a removal request.
	w.patchCluster(`{"metadata":{"annotations":null}}`)
	w.deleteCluster()
	w.letPass(2 * time.Second)
	w.wantUntouched(manifest)
	// The SveltosCluster is deleted.
	w.patchCluster(`{"metadata":{"finalizers":null}}`)
	w.letPass(2 * time.Second)
	w.wantUntouched(manifest)
	// Another client creates it again.
	recreated := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.cluster.Namespace, Name: w.cluster.Name}}
	recreated.Spec.PullMode = true
	if err := w.hubClient.Create(t.Context(), recreated); err != nil {
		t.Fatal(err)
	}
	w.letPass(2 * time.Second)
	w.wantUntouched(manifest)
	w.wantValue("kept", "one")
}

func TestUninstallKeepsForeignObjects(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	manifest := w.registerNext("c1")
	pull := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "pull"}}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "foreign", Labels: map[string]string{"app.kubernetes.io/name": "sveltos-applier"}}}
	for _, obj := range []client.Object{pull, role} {
		if err := w.client.Create(t.Context(), obj); err != nil {
			t.Fatal(err)
		}
	}
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	// Objects that are still deployed at the removal request stay, and so does the inventory.
	w.deliver(bundleOf("one", "kept"), bundle.StateApplied)
	w.deleteCluster()
	w.requestRemoval()
	w.wantEnded(ended)
	w.wantRemoved(manifest[1:])
	w.letPass(2 * time.Second)
	for _, obj := range []client.Object{pull, role, configMap("kept")} {
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil || len(obj.GetOwnerReferences()) > 0 {
			t.Errorf("%T: error %v, metadata %v", obj, err, obj.GetOwnerReferences())
		}
	}
	namespace := &corev1.Namespace{}
	if err := w.client.Get(t.Context(), client.ObjectKey{Name: kube.AgentNamespace}, namespace); err != nil || namespace.DeletionTimestamp != nil {
		t.Errorf("namespace with foreign objects: error %v, deleted %v", err, namespace.DeletionTimestamp)
	}
	secrets := &corev1.SecretList{}
	if err := w.client.List(t.Context(), secrets, client.InNamespace(kube.AgentNamespace)); err != nil || len(secrets.Items) < 2 {
		t.Errorf("inventory: got %d Secrets and error %v, want at least 2", len(secrets.Items), err)
	}
}

func TestUninstallKeepsTheAgentOfAnotherRegistration(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.registerNext("first")
	_, stop := w.runAgent(t.Context(), w.member.Config)
	w.wantReady()
	stop()
	first := w.cluster
	manifest := w.registerNext("second")
	w.cluster = first
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deleteCluster()
	w.requestRemoval()
	w.wantEnded(ended)
	w.wantUntouched(manifest)
	secret := client.ObjectKey{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret("first")}
	if err := w.client.Get(t.Context(), secret, &corev1.Secret{}); !apierrors.IsNotFound(err) {
		t.Errorf("the agent's own Secret: got error %v, want NotFound", err)
	}
}

func TestUninstallOutsideTheMember(t *testing.T) {
	t.Parallel()
	w := newWorld(t) // applies only the Namespace and the Secret
	w.addFinalizer()
	ended, _ := w.runAgent(t.Context(), w.member.Config)
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	// Bundles are withdrawn although the cluster is paused, because it is being deregistered.
	w.pause(true)
	w.deleteCluster()
	w.withdraw(id)
	w.wantDeleted("a")
	w.requestRemoval()
	w.wantEnded(ended)
	w.eventually("the namespace is deleted", func(ctx context.Context) error {
		err := w.client.Get(ctx, client.ObjectKey{Name: kube.AgentNamespace}, &corev1.Namespace{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("the object exists: %w", err)
		}
		return nil
	})
	if err := w.client.Get(t.Context(), client.ObjectKey{Name: "sveltos-applier-manager-role"}, &rbacv1.ClusterRole{}); !apierrors.IsNotFound(err) {
		t.Errorf("ClusterRole: got error %v, want NotFound", err)
	}
}
