package engine_test

import (
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

// engineOf returns an engine of a hub and a scope. All engines of the test store their records in one namespace.
func (c *cluster) engineOf(hub, scope string) *engine.Engine {
	c.t.Helper()
	return c.engine(nil, func(o *engine.Options) { o.Hub, o.Scope = hub, scope })
}

// workBundle returns the bundle of a Work with these objects.
func (c *cluster) workBundle(name string, objects ...*unstructured.Unstructured) bundle.Bundle {
	b := c.bundle(name, objects...)
	b.ID = bundle.ID{RequestorKind: "Work", RequestorName: c.ns + "-" + name, Feature: "Work"}
	b.Owner = bundle.Owner{Kind: "Work", Name: "karmada-es-one/" + name, Tier: bundle.DefaultTier}
	b.Items[0].Reference = bundle.Reference{}
	b.Options = bundle.Options{ContinueOnConflict: true, ContinueOnError: true, CorrectDrift: true, RejectUnmanaged: true}
	for _, obj := range objects {
		obj.SetLabels(map[string]string{"karmada.io/managed": "true"})
		obj.SetAnnotations(map[string]string{"work.karmada.io/name": name, "work.karmada.io/namespace": "karmada-es-one"})
	}
	return b
}

func TestRejectUnmanagedChangesNoUnmanagedObject(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("theirs", "1"))
	theirs := c.configMap("same-work", "1")
	theirs.SetLabels(map[string]string{"karmada.io/managed": "true"})
	theirs.SetAnnotations(map[string]string{"work.karmada.io/name": "one", "work.karmada.io/namespace": "karmada-es-one"})
	c.create(configMaps, theirs)
	e := c.engineOf("hub", "scope")
	b := c.workBundle("one", c.configMap("theirs", "2"), c.configMap("same-work", "2"), c.configMap("new", "2"))
	for range 2 {
		report := wantConvergeError(t, e, b)
		want := "ConfigMap " + c.ns + "/theirs already exists in the cluster and is not managed; " +
			"annotation work.karmada.io/conflict-resolution: overwrite takes it over"
		if report.Message != want {
			t.Errorf("message: got %q, want %q", report.Message, want)
		}
		if got := []string{c.value("theirs"), c.value("same-work"), c.value("new")}; !cmp.Equal(got, []string{"1", "2", "2"}) {
			t.Errorf("values: got %v", got)
		}
	}
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if c.value("theirs") != "1" || c.value("same-work") != "" || c.value("new") != "" {
		t.Errorf("after the withdrawal: %q, %q, %q", c.value("theirs"), c.value("same-work"), c.value("new"))
	}
	c.wantRecords(0)

	b.Items[0].Overwrite = true
	converge(t, e, b)
	if got := c.value("theirs"); got != "2" {
		t.Errorf("overwritten: got %q", got)
	}
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if got := c.value("theirs"); got != "" {
		t.Errorf("the object that was taken over was not deleted: %q", got)
	}
}

func TestManagedLabelAloneIsNotEnough(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engineOf("hub", "scope")
	for name, annotations := range map[string]map[string]string{
		"label-only":       nil,
		"another-work":     {"work.karmada.io/name": "two", "work.karmada.io/namespace": "karmada-es-one"},
		"another-space":    {"work.karmada.io/name": "one", "work.karmada.io/namespace": "karmada-es-two"},
		"without-its-name": {"work.karmada.io/namespace": "karmada-es-one"},
	} {
		theirs := c.configMap(name, "1")
		theirs.SetLabels(map[string]string{"karmada.io/managed": "true"})
		theirs.SetAnnotations(annotations)
		c.create(configMaps, theirs)
		b := c.workBundle("one", c.configMap(name, "2"))
		report := wantConvergeError(t, e, b)
		want := "ConfigMap " + c.ns + "/" + name + " already exists in the cluster and has label karmada.io/managed, but not the annotations " +
			"work.karmada.io/name and work.karmada.io/namespace of this Work; annotation work.karmada.io/conflict-resolution: overwrite takes it over"
		if report.Message != want {
			t.Errorf("%s: got %q, want %q", name, report.Message, want)
		}
		withdraw(t, e, bundle.Withdrawal{ID: b.ID})
		if got := c.value(name); got != "1" {
			t.Errorf("%s: got %q", name, got)
		}
	}
}

func TestRejectUnmanagedChangesNoObjectOfOtherOwners(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engineOf("hub", "scope")
	first, second := c.workBundle("first", c.configMap("a", "1")), c.workBundle("second", c.configMap("a", "2"))
	converge(t, e, first)
	report := wantConvergeError(t, e, second)
	if want := "is deployed by Work karmada-es-one/first"; !strings.Contains(report.Message, want) {
		t.Errorf("message: got %q, want %q in it", report.Message, want)
	}
	second.Items[0].Overwrite = true
	converge(t, e, second)
	// The first bundle reports the conflict, and does not take the object back.
	first.Items[0].Overwrite = true
	converge(t, e, first)
	wantConvergeError(t, e, second)
	wantConvergeError(t, e, second)
	if got := c.value("a"); got != "1" {
		t.Errorf("got %q, want the last delivered value", got)
	}
}

func TestObjectsOfOtherHubsAreNotChanged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	ours, theirs, sveltos := c.engineOf("hub-1", "scope-1"), c.engineOf("hub-2", "scope-2"), c.engineOf("", "")
	rejecting := c.workBundle("one", c.configMap("a", "1"))
	converge(t, ours, rejecting)
	for name, e := range map[string]*engine.Engine{"another hub": theirs, "a Sveltos member": sveltos} {
		for what, b := range map[string]bundle.Bundle{"rejecting": c.workBundle("one", c.configMap("a", "2")), "profile": c.bundle("one", c.configMap("a", "2"))} {
			b.Items[0].Overwrite, b.Owner.Tier = true, 1
			report := wantConvergeError(t, e, b)
			if !strings.Contains(report.Message, "belongs to another hub (hub-1)") {
				t.Errorf("%s, %s: got message %q", name, what, report.Message)
			}
			withdraw(t, e, bundle.Withdrawal{ID: b.ID})
		}
	}
	wantChanges(t, converge(t, ours, rejecting).Changes, counts{bundle.Unchanged: 1})

	// Another hub without records deletes no objects of our hub.
	withdraw(t, theirs, bundle.Withdrawal{ID: rejecting.ID})
	withdraw(t, sveltos, bundle.Withdrawal{ID: rejecting.ID})
	if got := c.value("a"); got != "1" {
		t.Errorf("value: got %q", got)
	}
	withdraw(t, c.engineOf("hub-1", "scope-1"), bundle.Withdrawal{ID: rejecting.ID})
	c.wantNames(configMaps)
	c.wantRecords(0)
}

func TestDriftCorrectionOfTwoHubsDoesNotConflict(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var beats [2]*runningEngine
	for i, hub := range []string{"hub-1", "hub-2"} {
		beats[i] = c.runEngineOf(t, hub)
	}
	first, second := c.workBundle("one", c.configMap("a", "1"), c.configMap("b", "1")), c.workBundle("one", c.configMap("a", "2"), c.configMap("c", "2"))
	converge(t, beats[0].Engine, first)
	wantConvergeError(t, beats[1].Engine, second)
	c.patch(configMaps, "a", `{"data":{"key":"3"}}`)
	c.delete(configMaps, "b")
	c.delete(configMaps, "c")
	eventually(t, "corrected", func() bool { return c.value("a") == "1" && c.value("b") == "1" && c.value("c") == "2" })
	withdraw(t, beats[1].Engine, bundle.Withdrawal{ID: second.ID})
	if got := []string{c.value("a"), c.value("b"), c.value("c")}; !cmp.Equal(got, []string{"1", "1", ""}) {
		t.Errorf("after the withdrawal by one hub: got %v", got)
	}
}

func TestOlderScopeIsTakenOver(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	before, after := c.engineOf("hub", "before"), c.engineOf("hub", "after")
	b := c.workBundle("one", c.configMap("a", "1"))
	converge(t, before, b)
	wantChanges(t, converge(t, after, b).Changes, counts{bundle.Configured: 1})
	if got := c.get(configMaps, c.ns, "a").GetAnnotations()[kube.AnnotationScope]; got != "after" {
		t.Errorf("scope: got %q", got)
	}
	// The engine of the earlier registration neither takes the object back nor deletes it.
	wantConvergeError(t, before, b)
	withdraw(t, before, bundle.Withdrawal{ID: b.ID})
	wantChanges(t, converge(t, after, b).Changes, counts{bundle.Unchanged: 1})

	// A running engine deletes only the records of earlier registrations.
	other, sveltos := c.workBundle("other", c.configMap("b", "1")), c.bundle("sveltos", c.configMap("c", "1"))
	converge(t, c.engineOf("another-hub", "before"), other)
	converge(t, c.engineOf("", ""), sveltos)
	converge(t, before, c.workBundle("left", c.configMap("left", "1")))
	// The scope is not confirmed by the hub yet, so the registration may be wrong.
	h := c.runEngineOf(t, "hub")
	drifted := c.workBundle("drifted", c.configMap("drifted", "1"))
	converge(t, h.Engine, drifted)
	c.patch(configMaps, "drifted", `{"data":{"key":"2"}}`)
	eventually(t, "corrected", func() bool { return c.value("drifted") == "1" })
	withdraw(t, h.Engine, bundle.Withdrawal{ID: drifted.ID})
	if got := len(c.listRecords()); got != 4 {
		t.Errorf("records before the scope is confirmed: got %d, want 4", got)
	}
	h.ConfirmScope()
	eventually(t, "the older records are deleted", func() bool { return len(c.listRecords()) == 2 })
	if got := c.value("left"); got != "1" {
		t.Errorf("names in the records: got %q", got)
	}
	withdraw(t, c.engineOf("another-hub", "before"), bundle.Withdrawal{ID: other.ID})
	withdraw(t, c.engineOf("", ""), bundle.Withdrawal{ID: sveltos.ID})
	withdraw(t, after, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps, "left")
	c.wantRecords(0)
}

// listRecords lists the Secrets of the inventory records.
func (c *cluster) listRecords() []unstructured.Unstructured {
	c.t.Helper()
	list, err := c.objects.Resource(secrets).Namespace(c.records).List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return list.Items
}

func TestScopesDoNotSeeEachOthersRecords(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	engines := map[string]*engine.Engine{"": c.engineOf("", ""), "1": c.engineOf("hub", "1"), "2": c.engineOf("hub", "2")}
	for scope, e := range engines {
		converge(t, e, c.bundle("one"+scope, c.configMap("a"+scope, "1")))
	}
	for scope := range engines {
		deployed, err := map[string]func() *engine.Engine{
			"": func() *engine.Engine { return c.engineOf("", "") }, "1": func() *engine.Engine { return c.engineOf("hub", "1") },
			"2": func() *engine.Engine { return c.engineOf("hub", "2") },
		}[scope]().ListDeployed(t.Context())
		if err != nil || len(deployed) != 1 || deployed[0].ID.RequestorName != c.ns+"-one"+scope {
			t.Errorf("bundles of scope %q: got %v, %v", scope, deployed, err)
		}
	}
}

func TestWithdrawalWithRejectUnmanaged(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engineOf("hub", "scope")
	b := c.workBundle("one", c.configMap("managed", "1"), c.configMap("released", "1"))
	converge(t, e, b)
	c.patch(configMaps, "released", `{"metadata":{"labels":{"karmada.io/managed":null}}}`)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if c.value("managed") != "" || c.value("released") != "1" {
		t.Errorf("left: managed %q, released %q", c.value("managed"), c.value("released"))
	}

	b = c.workBundle("two", c.configMap("left", "1"))
	obj := b.Items[0].Objects[0]
	obj.SetLabels(map[string]string{"karmada.io/managed": "true", "work.karmada.io/permanent-id": "id", "app": "left"})
	obj.SetAnnotations(map[string]string{
		"work.karmada.io/name": "two", "work.karmada.io/namespace": "karmada-es-one", "work.karmada.io/conflict-resolution": "abort", "note": "kept",
	})
	converge(t, e, b)
	withdraw(t, e, bundle.Withdrawal{ID: b.ID, Orphan: true})
	left := c.get(configMaps, c.ns, "left")
	if diff := cmp.Diff(left.GetLabels(), map[string]string{"app": "left"}); diff != "" {
		t.Errorf("labels (-got +want):\n%s", diff)
	}
	if diff := cmp.Diff(left.GetAnnotations(), map[string]string{"note": "kept"}); diff != "" {
		t.Errorf("annotations (-got +want):\n%s", diff)
	}
	c.wantRecords(0)
}

// runEngineOf runs an engine of a hub.
func (c *cluster) runEngineOf(t *testing.T, hub string, change ...func(*engine.Options)) *runningEngine {
	t.Helper()
	return c.runEngine(t, nil, append(change, func(o *engine.Options) { o.Hub, o.Scope = hub, "of-"+hub })...)
}

func TestOnChangeAndHealthOfObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var mu sync.Mutex // guards changes
	changes := map[bundle.ID]int{}
	h := c.runEngineOf(t, "hub", func(o *engine.Options) {
		o.OnChange = func(id bundle.ID) { mu.Lock(); defer mu.Unlock(); changes[id]++ }
	})
	changesOf := func(id bundle.ID) int { mu.Lock(); defer mu.Unlock(); return changes[id] }
	objects := decode(t, strings.ReplaceAll(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: NS}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: example.com/web:v1}]}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: nowhere, namespace: NS}
spec: {accessModes: [ReadWriteOnce], storageClassName: none, resources: {requests: {storage: 1Gi}}}
`, "NS", c.ns))
	b := c.workBundle("one", append(objects, c.configMap("plain", "1"))...)
	converge(t, h.Engine, b)
	existing := map[string]engine.Observation{}
	look := func() bool {
		all, err := h.Observe(t.Context(), b.ID)
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range all {
			existing[one.Resource] = one
		}
		return existing["deployments"].Health == engine.Healthy
	}
	eventually(t, "the Deployment is healthy", look)
	if got := string(existing["deployments"].Status); !strings.Contains(got, `"availableReplicas":1`) {
		t.Errorf("status of the Deployment: got %s", got)
	}
	if got := existing["persistentvolumeclaims"]; got.Health != engine.Unhealthy || !strings.Contains(string(got.Status), "Pending") {
		t.Errorf("claim: got %s %s", got.Health, got.Status)
	}
	if got := existing["configmaps"]; got.Health != engine.Healthy || got.Status != nil || got.Ref.Name != "plain" {
		t.Errorf("ConfigMap: got %v", got)
	}
	before := changesOf(b.ID)
	_, err := c.objects.Resource(schema.GroupVersionResource{Version: "v1", Resource: "persistentvolumeclaims"}).Namespace(c.ns).Patch(t.Context(), "nowhere", types.MergePatchType,
		[]byte(`{"status":{"capacity":{"storage":"1Gi"}}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "OnChange after a change of a status", func() bool { return changesOf(b.ID) > before })
	if all, err := h.Observe(t.Context(), c.workBundle("none").ID); err != nil || len(all) > 0 {
		t.Errorf("without a record: got %v, %v", all, err)
	}
}

func TestInterruptedRunWithRejectUnmanagedIsContinued(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for n := 1; ; n++ {
		c.create(configMaps, c.configMap("theirs", "1"))
		b := c.workBundle("one", c.configMap("theirs", "2"), c.configMap("new", "2"))
		b.Items[0].Overwrite = true
		line := &meter{}
		line.cutAfter(n)
		_, err := c.engine(line, func(o *engine.Options) { o.Hub, o.Scope = "hub", "scope" }).Converge(t.Context(), b)
		// An object that was applied before the interruption belongs to the Work, also if the record does not have it.
		b.Items[0].Overwrite = c.get(configMaps, c.ns, "theirs").GetLabels()["karmada.io/managed"] == ""
		converge(t, c.engineOf("hub", "scope"), b)
		withdraw(t, c.engineOf("hub", "scope"), bundle.Withdrawal{ID: b.ID})
		if c.value("theirs") != "" || c.value("new") != "" {
			t.Fatalf("cut after %d requests: left %q and %q", n, c.value("theirs"), c.value("new"))
		}
		c.wantRecords(0)
		if err == nil || t.Failed() {
			return
		}
	}
}
