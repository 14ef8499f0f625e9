package engine_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/kube"
)

func TestConvergeCreatesConfiguresAndPrunes(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	report := converge(t, e, c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"), c.configMap("c", "1")))
	wantChanges(t, report.Changes, counts{bundle.Created: 3})
	if diff := cmp.Diff(report.Kinds, []string{"ConfigMap.v1."}); diff != "" {
		t.Errorf("kinds (-got +want):\n%s", diff)
	}
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "2"))
	report = converge(t, e, b)
	wantChanges(t, report.Changes, counts{bundle.Unchanged: 1, bundle.Configured: 1, bundle.Deleted: 1})
	wantChanges(t, converge(t, c.engine(nil), b).Changes, counts{bundle.Unchanged: 2})
	c.wantNames(configMaps, "a", "b")
	got := c.get(configMaps, c.ns, "b")
	if value, _, _ := unstructured.NestedString(got.Object, "data", "key"); value != "2" {
		t.Errorf("value: got %q, want 2", value)
	}
	for name, want := range map[string]string{
		kube.AnnotationOwnerKind: "ClusterProfile", kube.AnnotationOwnerName: "one", kube.AnnotationOwnerTier: "100",
		kube.AnnotationReferenceKind: "ConfigMap", kube.AnnotationReferenceNS: "default", kube.AnnotationReferenceName: "manifests",
		kube.AnnotationRequestor: "ClusterSummary/" + c.ns + "-one/Resources",
	} {
		if value := got.GetAnnotations()[name]; value != want {
			t.Errorf("annotation %s: got %q, want %q", name, value, want)
		}
	}
	digest, state, ok, err := e.RecordedDigest(t.Context(), b.ID)
	if err != nil || !ok || digest != report.Digest || state != bundle.StateApplied {
		t.Errorf("RecordedDigest: got %s %s %t %v", digest, state, ok, err)
	}
}

func TestUnchangedRunReadsPerKindNotPerObject(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	var objects []*unstructured.Unstructured
	for i := range 50 {
		objects = append(objects, c.configMap(fmt.Sprintf("cm-%02d", i), "1"))
	}
	b := c.bundle("many", objects...)
	converge(t, c.engine(nil), b)
	meter := &meter{}
	e := c.engine(meter) // a new process
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: 50})
	if got := meter.take(); len(got) != 2 {
		t.Errorf("requests of an unchanged run: got %d, want the record and one list:\n%s", len(got), strings.Join(got, "\n"))
	}
	objects[7] = c.configMap("cm-07", "2")
	report := converge(t, e, c.bundle("many", objects...))
	wantChanges(t, report.Changes, counts{bundle.Unchanged: 49, bundle.Configured: 1})
	countPatches := 0
	for _, line := range meter.take() {
		if strings.HasPrefix(line, "PATCH") {
			countPatches++
		}
	}
	if countPatches != 1 {
		t.Errorf("apply requests: got %d, want 1", countPatches)
	}
}

func TestQuantitiesAndDefaultsAreNoDrift(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("web", decode(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: %[1]s, creationTimestamp: null}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: web
        image: example.invalid/web:1
        ports: [{containerPort: 80}]
        resources: {requests: {cpu: 1000m, memory: "1024Mi"}}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: %[1]s}
spec: {selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: v1
kind: Secret
metadata: {name: web, namespace: %[1]s}
stringData: {password: secret}
`, c.ns))...)
	e := c.engine(nil)
	report := converge(t, e, b)
	var order []string
	for _, change := range report.Changes {
		order = append(order, change.Ref.Kind)
	}
	if diff := cmp.Diff(order, []string{"Secret", "Service", "Deployment"}); diff != "" {
		t.Errorf("order (-got +want):\n%s", diff)
	}
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: 3})
	c.patch(secrets, "web", `{"data":{"password":"b3RoZXI="}}`)
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Unchanged: 2, bundle.Configured: 1})
}

func TestPruneKeepsObjectsThatUsersCreatedAgain(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	converge(t, e, c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1")))
	// The object has our ownership annotations, as after a restore from a backup; only the UID is different.
	again := c.get(configMaps, c.ns, "b")
	c.delete(configMaps, "b")
	again.SetUID("")
	again.SetResourceVersion("")
	again.SetManagedFields(nil)
	c.create(configMaps, again)
	report := converge(t, e, c.bundle("one", c.configMap("a", "1")))
	wantChanges(t, report.Changes, counts{bundle.Unchanged: 1, bundle.Skipped: 1})
	if c.get(configMaps, c.ns, "b") == nil {
		t.Error("the user's object was deleted")
	}
}

func TestAdoptedObjectsStayAfterWithdrawal(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.create(configMaps, c.configMap("there", "0"))
	c.create(configMaps, c.configMap("there-too", "0"))
	e := c.engine(nil)
	report := converge(t, e, c.bundle("one", c.configMap("there", "1"), c.configMap("there-too", "1"), c.configMap("made", "1")))
	wantChanges(t, report.Changes, counts{bundle.Configured: 2, bundle.Created: 1})
	converge(t, e, c.bundle("one", c.configMap("there", "2"), c.configMap("made", "1")))
	withdraw(t, e, bundle.Withdrawal{ID: report.ID})
	for name, want := range map[string]bool{"there": true, "there-too": true, "made": false} {
		obj := c.get(configMaps, c.ns, name)
		if got := obj != nil; got != want {
			t.Errorf("%s exists: got %t, want %t", name, got, want)
		}
		if obj != nil && (len(obj.GetAnnotations()) > 0 || len(obj.GetLabels()) > 0) {
			t.Errorf("%s still has ownership annotations: %v %v", name, obj.GetLabels(), obj.GetAnnotations())
		}
	}
	c.wantRecords(0)
}

func TestConflictsAreDecidedByTier(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change    func(*bundle.Bundle)
		takesOver bool
	}{
		"same tier":                   {change: func(*bundle.Bundle) {}},
		"higher tier":                 {change: func(b *bundle.Bundle) { b.Owner.Tier = 200 }},
		"lower tier":                  {change: func(b *bundle.Bundle) { b.Owner.Tier = 50 }, takesOver: true},
		"same owner, same reference":  {change: func(b *bundle.Bundle) { b.Owner.Name = "first" }, takesOver: true},
		"same owner, lower reference": {change: func(b *bundle.Bundle) { b.Owner.Name = "first"; b.Items[0].Reference = reference("other", 1) }, takesOver: true},
		"same owner, other reference": {change: func(b *bundle.Bundle) { b.Owner.Name = "first"; b.Items[0].Reference = reference("other", 100) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			e := c.engine(nil)
			first := c.bundle("first", c.configMap("shared", "1"))
			converge(t, e, first)
			second := c.bundle("second", c.configMap("shared", "2"), c.configMap("zz", "2"))
			test.change(&second)
			conflicting := first
			if test.takesOver {
				wantChanges(t, converge(t, e, second).Changes, counts{bundle.Configured: 1, bundle.Created: 1})
			} else {
				conflicting = second
			}
			report, err := e.Converge(t.Context(), conflicting)
			if !errors.Is(err, engine.ErrConflict) || report.State != bundle.StateFailed {
				t.Fatalf("the bundle with the conflict: got %s and %v", report.State, err)
			}
			want := "A conflict was detected while deploying resource ConfigMap:" + c.ns + "/shared. The Sveltos profile currently deploying this resource is ClusterProfile "
			if !strings.HasPrefix(report.Message, want) {
				t.Errorf("message: got %q, want prefix %q", report.Message, want)
			}
			// The withdrawal of the second bundle changes no object of the first.
			withdraw(t, e, bundle.Withdrawal{ID: conflicting.ID})
			if c.get(configMaps, c.ns, "shared") == nil {
				t.Error("the withdrawal of the second bundle deleted the object of the first")
			}
		})
	}
}

func reference(name string, tier int32) bundle.Reference {
	return bundle.Reference{Kind: "ConfigMap", Namespace: "default", Name: name, Tier: tier}
}

func TestContinueOnConflictAppliesOtherObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	converge(t, e, c.bundle("first", c.configMap("m", "1")))
	b := c.bundle("second", c.configMap("old", "1"))
	converge(t, e, b)
	b = c.bundle("second", c.configMap("m", "2"), c.configMap("new", "1"))
	b.Options.ContinueOnConflict = true
	report := wantConvergeError(t, e, b)
	wantChanges(t, report.Changes, counts{bundle.Failed: 1, bundle.Created: 1})
	c.wantNames(configMaps, "m", "new", "old") // a failed run prunes no objects
	withdraw(t, e, bundle.Withdrawal{ID: c.bundle("first").ID})
	report = converge(t, e, b)
	wantChanges(t, report.Changes, counts{bundle.Created: 1, bundle.Unchanged: 1, bundle.Deleted: 1})
}

func TestFailureNamesObjectAndPrunesNothing(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	converge(t, e, c.bundle("one", c.configMap("old", "1")))
	bad := c.configMap("bad", "1")
	bad.Object["data"] = map[string]any{"not a key!": "1"}
	report := wantConvergeError(t, e, c.bundle("one", bad, c.configMap("good", "1")))
	if want := "ConfigMap " + c.ns + "/bad: "; !strings.HasPrefix(report.Message, want) {
		t.Errorf("message: got %q, want prefix %q", report.Message, want)
	}
	again := wantConvergeError(t, c.engine(nil), c.bundle("one", bad, c.configMap("good", "1")))
	if again.Message != report.Message {
		t.Errorf("messages of the same failure differ: %q and %q", report.Message, again.Message)
	}
	if c.get(configMaps, c.ns, "old") == nil {
		t.Error("a failed run pruned")
	}
	deployed, err := e.ListDeployed(t.Context())
	if err != nil || len(deployed) != 1 || deployed[0].Report.State != bundle.StateFailed || deployed[0].Report.Message != report.Message {
		t.Errorf("bundles: got %v, %v", deployed, err)
	}
	converge(t, e, c.bundle("one", c.configMap("good", "1")))
	c.wantNames(configMaps, "good")
}

func TestDuplicatesAreRefusedBeforeAnyWrite(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	meter := &meter{}
	e := c.engine(meter)
	report := wantConvergeError(t, e, c.bundle("one", c.configMap("a", "1"), c.configMap("a", "2")))
	want := "ConfigMap " + c.ns + "/a is listed twice: in ConfigMap default/manifests and in ConfigMap default/manifests"
	if report.Message != want {
		t.Errorf("message: got %q, want %q", report.Message, want)
	}
	if report.Digest == (bundle.Digest{}) {
		t.Error("the report has no bundle ID")
	}
	for _, line := range meter.take() {
		if !strings.HasPrefix(line, "GET") {
			t.Errorf("request: %s", line)
		}
	}
}

func TestForceRecreatesImmutableObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	immutable := func(value string) *unstructured.Unstructured {
		obj := c.configMap("fixed", value)
		obj.Object["immutable"] = true
		return obj
	}
	converge(t, e, c.bundle("one", immutable("1")))
	before := c.get(configMaps, c.ns, "fixed").GetUID()
	wantConvergeError(t, e, c.bundle("one", immutable("2")))
	b := c.bundle("one", immutable("2"))
	b.Items[0].Force = true
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Configured: 1})
	after := c.get(configMaps, c.ns, "fixed").GetUID()
	if after == before {
		t.Error("the object was not replaced")
	}
	// An object is not deleted if the API server would refuse the new object.
	broken := immutable("3")
	broken.Object["data"] = map[string]any{"not a key!": "1"}
	b = c.bundle("one", broken)
	b.Items[0].Force = true
	wantConvergeError(t, e, b)
	if got := c.get(configMaps, c.ns, "fixed"); got == nil || got.GetUID() != after {
		t.Error("the object was deleted, but its replacement is invalid")
	}
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
}

func TestNamespacesAreCreatedAndKept(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	made := c.ns + "-made"
	obj := c.configMap("a", "1")
	obj.SetNamespace(made)
	b := c.bundle("one", obj)
	b.Items[0].SkipNamespaceCreation = true
	wantConvergeError(t, e, b)
	b.Items[0].SkipNamespaceCreation = false
	converge(t, e, b)
	t.Cleanup(func() {
		_ = c.objects.Resource(namespaces).Delete(context.WithoutCancel(t.Context()), made, metav1.DeleteOptions{})
	})
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if got := c.get(namespaces, "", made); got == nil || got.GetDeletionTimestamp() != nil {
		t.Error("a namespace that was not in the bundle was deleted")
	}
	if c.get(configMaps, made, "a") != nil {
		t.Error("the object still exists")
	}
}

func TestNamespacesOfTheBundleAreDeletedLast(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	e := c.engine(nil)
	own := c.ns + "-own"
	obj := c.configMap("a", "1")
	obj.SetNamespace(own)
	b := c.bundle("one", append(decode(t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+own+"}\n"), obj)...)
	wantChanges(t, converge(t, e, b).Changes, counts{bundle.Created: 2})
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	if c.get(namespaces, "", own) != nil {
		t.Error("the namespace still exists")
	}
	c.wantRecords(0)
}

func decode(t testing.TB, text string) []*unstructured.Unstructured {
	t.Helper()
	objects, err := kube.DecodeManifest([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return objects
}
