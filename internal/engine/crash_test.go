package engine_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
)

func TestInterruptedRunIsContinuedAtAnyRequest(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]bool{"request is lost": false, "answer is lost": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			n := 1
			for c.interruptRun(&meter{late: late}, n) {
				n++
			}
			t.Logf("a run took %d requests", n)
			if n < 8 {
				t.Errorf("the run was interrupted only %d times", n)
			}
		})
	}
}

// interruptRun cuts the connection of a run after n requests and continues with new engines. It returns false if the
// run succeeds.
func (c *cluster) interruptRun(line *meter, n int) bool {
	c.t.Helper()
	before := c.bundle("one", c.configMap("changed", "1"), c.configMap("dropped", "1"), c.configMap("kept", "1"))
	after := c.bundle("one", c.configMap("changed", "2"), c.configMap("kept", "1"), c.configMap("new", "2"))
	converge(c.t, c.engine(nil), before)
	line.cutAfter(n)
	report, err := c.engine(line).Converge(c.t.Context(), after)
	if err != nil && (report.State != bundle.StateFailed || !strings.Contains(report.Message, errCut.Error())) {
		c.t.Fatalf("cut after %d requests: got %s %q", n, report.State, report.Message)
	}
	if n%2 == 0 {
		// For even n the next delivery is the interrupted bundle, otherwise another bundle.
		converge(c.t, c.engine(nil), after)
		c.wantNames(configMaps, "changed", "kept", "new")
	}
	converge(c.t, c.engine(nil), c.bundle("one", c.configMap("other", "1")))
	c.wantNames(configMaps, "other")
	withdraw(c.t, c.engine(nil), bundle.Withdrawal{ID: before.ID})
	c.wantNames(configMaps)
	c.wantRecords(0)
	if c.t.Failed() {
		c.t.Fatalf("cut after %d requests", n)
	}
	return err != nil
}

func TestInterruptedWithdrawalIsContinued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"))
	for n := 0; ; n++ {
		converge(t, c.engine(nil), b)
		line := &meter{}
		line.cutAfter(n)
		done, err := c.engine(line).Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
		if err == nil && done {
			break
		}
		withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
		c.wantNames(configMaps)
		c.wantRecords(0)
		if t.Failed() {
			t.Fatalf("cut after %d requests", n)
		}
	}
	c.wantNames(configMaps)
	c.wantRecords(0)
}

func TestDefinitionAndItsObjectsInOneBundle(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	group := c.ns + ".example.com"
	objects := decode(t, strings.ReplaceAll(`
apiVersion: GROUP/v1
kind: Boat
metadata: {name: titanic}
spec: {length: 269}
---
apiVersion: GROUP/v1
kind: Sea
metadata: {name: atlantic, namespace: dropped-from-cluster-scoped}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.GROUP}
spec:
  group: GROUP
  names: {kind: Boat, plural: boats}
  scope: Namespaced
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: seas.GROUP}
spec:
  group: GROUP
  names: {kind: Sea, plural: seas}
  scope: Cluster
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`, "GROUP", group))
	b := c.bundle("fleet-"+c.ns, objects...)
	b.Items[0].Release = &bundle.Release{Name: "fleet", Namespace: c.ns}
	e := c.engine(nil)
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Created: 4})
	boats := schema.GroupVersionResource{Group: group, Version: "v1", Resource: "boats"}
	boat := c.get(boats, c.ns, "titanic")
	if boat == nil {
		t.Fatal("the object without a namespace is not in the namespace of its release")
	}
	wantChanges(t, converge(t, c.engine(nil), b).Changes, counts{bundle.Unchanged: 4})
	// Another client deletes the definition and thereby its objects, while the engine has the kind in its cache.
	c.deleteAndWait(definitions, "boats."+group)
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: 2, bundle.Created: 2})

	// A finalizer keeps the object. The definition must stay, because the cleanup of the object may need it.
	c.patch(boats, "titanic", `{"metadata":{"finalizers":["example.com/salvage"]}}`)
	done, err := e.Withdraw(t.Context(), bundle.Withdrawal{ID: b.ID})
	if done || err != nil {
		t.Fatalf("withdraw with a finalizer: got %t, %v", done, err)
	}
	if crd := c.get(definitions, "", "boats."+group); crd == nil || crd.GetDeletionTimestamp() != nil {
		t.Error("the definition was deleted before its last object")
	}
	c.wantRecords(1)
	c.patch(boats, "titanic", `{"metadata":{"finalizers":null}}`)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	if c.get(definitions, "", "seas."+group) != nil {
		t.Error("a definition is left")
	}
	c.wantRecords(0)
}

func TestUnknownKindIsNamedInTheFailure(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	objects := decode(t, "apiVersion: nowhere.example.com/v1\nkind: Ghost\nmetadata: {name: g}\n")
	b := c.bundle("one", append(objects, c.configMap("a", "1"))...)
	e := c.engine(nil)
	report := wantConvergeError(t, e, b)
	if !strings.HasPrefix(report.Message, "Ghost nowhere.example.com g: the cluster does not know this kind") {
		t.Errorf("message: %q", report.Message)
	}
	c.wantNames(configMaps, "a")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
	c.wantRecords(0)
}

func TestLargeBundle(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const count = 2000
	var objects []*unstructured.Unstructured
	for i := range count {
		objects = append(objects, c.configMap(fmt.Sprintf("cm-%04d", i), randomText(i)))
	}
	b := c.bundle("large", objects...)
	e := c.engine(nil)
	began := time.Now()
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Created: count})
	t.Logf("created %d objects in %s", count, time.Since(began))
	began = time.Now()
	wantChanges(t, converge(t, c.engine(nil), b).Changes, counts{bundle.Unchanged: count})
	t.Logf("an unchanged run took %s", time.Since(began))
	// The content does not fit into one Secret. Resume reads it from several Secrets.
	report, ok, err := c.engine(nil).Resume(t.Context(), b.ID)
	if err != nil || !ok || report.State != bundle.StateApplied {
		t.Fatalf("resume: got %s, %t, %v", report.State, ok, err)
	}
	wantChanges(t, report.Changes, counts{bundle.Unchanged: count})
	// The engine detects a lost chunk, and the next run writes it again.
	parts := metav1.ListOptions{LabelSelector: "towline.dev/record=chunk"}
	if err := c.objects.Resource(secrets).Namespace(c.records).DeleteCollection(t.Context(), metav1.DeleteOptions{}, parts); err != nil {
		t.Fatal(err)
	}
	if _, _, ok, err := e.RecordedDigest(t.Context(), b.ID); ok || err != nil {
		t.Errorf("RecordedDigest without a chunk: got %t, %v", ok, err)
	}
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: count})
	if _, _, ok, err := e.RecordedDigest(t.Context(), b.ID); !ok || err != nil {
		t.Errorf("RecordedDigest with all chunks: got %t, %v", ok, err)
	}
	wantChanges(t, converge(t, e, c.bundle("large", objects[:10]...)).Changes, counts{bundle.Unchanged: 10, bundle.Deleted: count - 10})
	c.wantRecords(1) // the former chunks are deleted
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
	c.wantRecords(0)
}

// randomText returns about 1.5 KB of text that does not compress well.
func randomText(seed int) string {
	var text strings.Builder
	state := uint64(seed)*2654435761 + 1
	for text.Len() < 1500 {
		state = state*6364136223846793005 + 1442695040888963407
		fmt.Fprintf(&text, "%016x", state)
	}
	return text.String()
}

func TestOrphanRemovesOwnershipAnnotations(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.bundle("one", c.configMap("a", "1"))
	converge(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID, Orphan: true})
	obj := c.get(configMaps, c.ns, "a")
	if obj == nil || len(obj.GetAnnotations()) > 0 || len(obj.GetLabels()) > 0 {
		t.Fatalf("got %v, want the object without ownership annotations", obj)
	}
	c.wantRecords(0)
	// The object belongs to the user now: the next profile adopts it.
	b = c.bundle("two", c.configMap("a", "2"))
	converge(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if c.get(configMaps, c.ns, "a") == nil {
		t.Error("the withdrawal of another profile deleted the orphaned object")
	}
}

func TestLostRecordIsReportedAndRebuilt(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.bundle("one", c.configMap("a", "1"))
	converge(t, e, b)
	err := c.objects.Resource(secrets).Namespace(c.records).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok, err := e.RecordedDigest(t.Context(), b.ID); ok || err != nil {
		t.Errorf("RecordedDigest: got %t, %v; want no record", ok, err)
	}
	if _, ok, err := e.Resume(t.Context(), b.ID); ok || err != nil {
		t.Errorf("Resume: got %t, %v; want no record", ok, err)
	}
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: 1})
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
}

func TestOneTimeBundlesAreNotCorrected(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	b := c.bundle("one", c.configMap("a", "1"))
	b.Options.CorrectDrift = false
	converge(t, e, b)
	c.delete(configMaps, "a")
	converge(t, e, b)
	c.wantNames(configMaps)
	b.Options.CorrectDrift = true
	converge(t, e, b)
	c.wantNames(configMaps, "a")
}

func (c *cluster) deleteAndWait(gvr schema.GroupVersionResource, name string) {
	c.t.Helper()
	if err := c.objects.Resource(gvr).Delete(c.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		c.t.Fatal(err)
	}
	eventually(c.t, name+" is deleted", func() bool { return c.get(gvr, "", name) == nil })
}

func TestEndedContextEndsTheRun(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	report, err := c.engine(nil).Converge(ctx, c.bundle("one", c.configMap("a", "1")))
	if err == nil || report.State != bundle.StateFailed {
		t.Errorf("got %s, %v", report.State, err)
	}
}
