package agent_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func TestAgentReportsAndDelivers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.startAgent()

	w.eventually("the cluster is ready", func(context.Context) error {
		status := w.sveltosCluster().Status
		if !status.Ready || status.Version != "v1.36.3" || status.AgentLastReportTime == nil || !slices.Contains(status.APIVersions, "apps/v1/Deployment") {
			return fmt.Errorf("status: %+v", status)
		}
		return nil
	})
	w.eventually("the lease is renewed", func(ctx context.Context) error {
		lease := &coordinationv1.Lease{}
		if err := w.hubClient.Get(ctx, w.cluster, lease); err != nil {
			return err
		}
		if lease.Spec.RenewTime == nil || time.Since(lease.Spec.RenewTime.Time) > 5*time.Second {
			return fmt.Errorf("renewed %v", lease.Spec.RenewTime)
		}
		if lease.Spec.LeaseDurationSeconds == nil || *lease.Spec.LeaseDurationSeconds != 44 {
			return fmt.Errorf("duration in seconds %v, want 44", lease.Spec.LeaseDurationSeconds)
		}
		return nil
	})

	w.deliver(bundleOf("one", "a", "b"), bundle.StateApplied)
	w.wantValue("a", "one")
	report := w.deliver(bundleOf("two", "b"), bundle.StateApplied)
	w.wantValue("b", "two")
	w.wantDeleted("a")
	if !slices.Equal(report.Kinds, []string{"ConfigMap.v1."}) || report.LastApplied.IsZero() {
		t.Errorf("report: %+v", report)
	}

	w.reportsNewKinds()
	w.restoresStatus()
	w.respectsPause()

	// After a restart, the agent makes no changes and fetches no content.
	version := w.groupVersion()
	stop()
	w.startAgent()
	w.eventually("the restarted agent reports", func(context.Context) error {
		if at := w.sveltosCluster().Status.AgentLastReportTime; time.Since(at.Time) > 5*time.Second {
			return fmt.Errorf("last report: %v", at)
		}
		return nil
	})
	if now := w.groupVersion(); now != version {
		t.Errorf("group was written by a restart: resourceVersion %s, then %s", version, now)
	}

	w.withdraw(id)
	w.wantDeleted("b")
}

func (w *world) groupVersion() string {
	w.t.Helper()
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := w.hubClient.List(w.t.Context(), groups, client.InNamespace(w.cluster.Namespace)); err != nil {
		w.t.Fatal(err)
	}
	for _, group := range groups.Items {
		if group.Annotations[libv1beta1.PullRequestorNameAnnotation] == id.RequestorName {
			return group.ResourceVersion
		}
	}
	return ""
}

// reportsNewKinds delivers a CRD, and waits until the agent reports its kind.
func (w *world) reportsNewKinds() {
	w.t.Helper()
	b := bundleOf("", []string{}...)
	b.ID.Feature = "Helm"
	b.Items = []bundle.Item{{Objects: []*unstructured.Unstructured{definition("Boat")}}}
	w.deliver(b, bundle.StateApplied)
	w.wantKind("Boat", true)

	ship := definition("Ship")
	if err := w.client.Create(w.t.Context(), ship); err != nil {
		w.t.Fatal(err)
	}
	w.wantKind("Ship", true)
	if err := w.client.Delete(w.t.Context(), ship); err != nil {
		w.t.Fatal(err)
	}
	w.wantKind("Ship", false)
}

// definition returns a CustomResourceDefinition.
func definition(kind string) *unstructured.Unstructured {
	singular := strings.ToLower(kind)
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": singular + "s.example.com"},
		"spec": map[string]any{
			"group": "example.com", "scope": "Namespaced",
			"names": map[string]any{"plural": singular + "s", "singular": singular, "kind": kind, "listKind": kind + "List"},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true, "schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}},
			}},
		},
	}}
}

// wantKind waits until the hub's list of the member's kinds has the kind, or does not have it.
func (w *world) wantKind(kind string, served bool) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("kind %s is served: %t", kind, served), func(context.Context) error {
		if slices.Contains(w.sveltosCluster().Status.APIVersions, "example.com/v1/"+kind) != served {
			return errors.New("the cluster does not report it")
		}
		return nil
	})
}

// restoresStatus removes fields from the status of the SveltosCluster, and waits until the agent reports them again.
func (w *world) restoresStatus() {
	w.t.Helper()
	for _, field := range []string{"apiVersions", "version", "ready"} {
		patch := client.RawPatch(types.MergePatchType, []byte(`{"status":{"`+field+`":null}}`))
		if err := w.hubClient.Status().Patch(w.t.Context(), w.sveltosCluster(), patch); err != nil {
			w.t.Fatal(err)
		}
		w.eventually(field+" is reported again", func(context.Context) error {
			status := w.sveltosCluster().Status
			if !status.Ready || status.Version == "" || !slices.Contains(status.APIVersions, "apps/v1/Deployment") {
				return fmt.Errorf("status: %+v", status)
			}
			return nil
		})
	}
}

// respectsPause checks that the agent makes no changes on a paused cluster, and continues after the pause.
func (w *world) respectsPause() {
	w.t.Helper()
	w.pause(true)
	w.eventually("the pause is stored on the member", func(ctx context.Context) error {
		secret := &corev1.Secret{}
		err := w.client.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret(w.cluster.Name)}, secret)
		if err == nil && secret.Annotations["towline.dev/paused"] != "true" {
			err = errors.New("it is not")
		}
		return err
	})
	if _, err := w.transport.Deliver(w.t.Context(), fleet.FromSveltosCluster(w.sveltosCluster()), bundleOf("three", "b")); err != nil {
		w.t.Fatal(err)
	}
	if err := w.client.Patch(w.t.Context(), configMap("b"), client.RawPatch(types.MergePatchType, []byte(`{"data":{"key":"by hand"}}`))); err != nil {
		w.t.Fatal(err)
	}
	w.letPass(2 * time.Second)
	if got, err := w.value(w.t.Context(), "b"); err != nil || got != "by hand" {
		w.t.Errorf("ConfigMap of a paused cluster: got %q and error %v, want no change", got, err)
	}
	w.pause(false)
	w.deliver(bundleOf("three", "b"), bundle.StateApplied)
	w.wantValue("b", "three")
}

func (w *world) pause(paused bool) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"paused":%t}}`, paused)
	if err := w.hubClient.Patch(w.t.Context(), w.sveltosCluster(), client.RawPatch(types.MergePatchType, patch)); err != nil {
		w.t.Fatal(err)
	}
}

func TestDriftIsCorrectedWhileTheHubIsAway(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, localkube.ForTest(t, localkube.Named("hub")))
	stop := w.startAgent()
	w.deliver(bundleOf("one", "edited", "deleted"), bundle.StateApplied)

	if err := w.hub.Kill(); err != nil {
		t.Fatal(err)
	}
	w.wantCorrected()
	stop()
	stop = w.startAgent()
	w.wantCorrected()

	if err := w.hub.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.deliver(bundleOf("two", "edited"), bundle.StateApplied)
	w.wantValue("edited", "two")
	w.wantDeleted("deleted")

	// After the loss of the inventory, the agent fetches the content again, and still prunes unwanted objects.
	stop()
	w.deleteInventory()
	if err := w.hubClient.DeleteAllOf(t.Context(), &libv1beta1.ConfigurationBundle{}, client.InNamespace(w.cluster.Namespace)); err != nil {
		t.Fatal(err)
	}
	if err := w.client.Delete(t.Context(), configMap("edited")); err != nil {
		t.Fatal(err)
	}
	w.startAgent()
	w.eventually("the object is back", func(ctx context.Context) error {
		w.deliver(bundleOf("two", "edited"), bundle.StateApplied)
		_, err := w.value(ctx, "edited")
		return err
	})
}

func TestLostInventoryIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.startAgent()
	b := bundleOf("one", "a", "b")
	w.deliver(b, bundle.StateApplied)
	if err := w.hubClient.DeleteAllOf(t.Context(), &libv1beta1.ConfigurationBundle{}, client.InNamespace(w.cluster.Namespace)); err != nil {
		t.Fatal(err)
	}
	w.deleteInventory()
	w.eventually("the missing content is reported", func(ctx context.Context) error {
		groups := &libv1beta1.ConfigurationGroupList{}
		if err := w.hubClient.List(ctx, groups, client.InNamespace(w.cluster.Namespace)); err != nil {
			return err
		}
		if len(groups.Items) != 1 || !groups.Items[0].Status.ContentMissing {
			return fmt.Errorf("groups: %+v", groups.Items)
		}
		return nil
	})
	w.deliver(b, bundle.StateApplied)
	w.wantObjectsCorrected("a", "b")

	// Without the inventory, the delivered objects are still withdrawn.
	w.deleteInventory()
	w.withdraw(b.ID)
	w.wantDeleted("a")
	w.wantDeleted("b")
}

// deleteInventory deletes all Secrets in the agent's namespace except the one with the hub's kubeconfig.
func (w *world) deleteInventory() {
	w.t.Helper()
	secrets := &corev1.SecretList{}
	if err := w.client.List(w.t.Context(), secrets, client.InNamespace(kube.AgentNamespace)); err != nil {
		w.t.Fatal(err)
	}
	for i := range secrets.Items {
		if secrets.Items[i].Name == join.KubeconfigSecret(w.cluster.Name) {
			continue
		}
		if err := w.client.Delete(w.t.Context(), &secrets.Items[i]); err != nil {
			w.t.Fatal(err)
		}
	}
}

// wantCorrected edits one object and deletes another, and waits until the agent has corrected both.
func (w *world) wantCorrected() {
	w.t.Helper()
	w.wantObjectsCorrected("edited", "deleted")
}

func (w *world) wantObjectsCorrected(edited, deleted string) {
	w.t.Helper()
	w.wantValue(edited, "one")
	if err := w.client.Patch(w.t.Context(), configMap(edited), client.RawPatch(types.MergePatchType, []byte(`{"data":{"key":"by hand"}}`))); err != nil {
		w.t.Fatal(err)
	}
	if err := w.client.Delete(w.t.Context(), configMap(deleted)); err != nil {
		w.t.Fatal(err)
	}
	w.wantValue(edited, "one")
	w.wantValue(deleted, "one")
}

func TestFailureIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.startAgent()
	b := bundleOf("x", "fine", "Not.A.Name!")
	report := w.deliver(b, bundle.StateFailed)
	if report.Message == "" {
		t.Error("the report has no message")
	}
	w.deliver(bundleOf("x", "fine"), bundle.StateApplied)
	w.wantValue("fine", "x")
}

func TestInvalidOptions(t *testing.T) {
	t.Parallel()
	if err := agent.Run(t.Context(), agent.Options{}); err == nil {
		t.Error("no member: got no error")
	}
	if err := agent.Run(t.Context(), agent.Options{Member: &rest.Config{}, Namespace: "n"}); err == nil {
		t.Error("no name: got no error")
	}
}

// Another client writes into the status of a group that it is removed, while the agent does not run.
func TestForeignStatusDoesNotPreventWithdrawal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.startAgent()
	b := bundleOf("one", "a")
	w.deliver(b, bundle.StateApplied)
	stop()
	m := fleet.FromSveltosCluster(w.sveltosCluster())
	if done, err := w.transport.Withdraw(t.Context(), m, bundle.Withdrawal{ID: b.ID}); done || err != nil {
		t.Fatalf("withdraw without an agent: got %t, %v", done, err)
	}
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := w.hubClient.List(t.Context(), groups, client.InNamespace(w.cluster.Namespace)); err != nil || len(groups.Items) != 1 {
		t.Fatalf("groups: got %d and error %v, want one", len(groups.Items), err)
	}
	group := &groups.Items[0]
	before := group.DeepCopy()
	group.Status.DeploymentStatus = libv1beta1.FeatureStatusRemoved
	group.Status.ObservedRequestorHash, group.Status.ObservedGeneration = group.Spec.RequestorHash, group.Generation
	if err := w.hubClient.Status().Patch(t.Context(), group, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	w.startAgent()
	w.eventually("ConfigMap a is deleted", func(ctx context.Context) error {
		_, err := w.value(ctx, "a")
		if err == nil {
			err = errors.New("it exists")
		}
		return client.IgnoreNotFound(err)
	})
	w.withdraw(b.ID)
}
