package stories

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/localkube"
)

// pairWork is a Work with two objects, further fields of its spec, and annotations of its first manifest.
const pairWork = `
apiVersion: work.karmada.io/v1alpha1
kind: Work
metadata:
  name: pair
  namespace: karmada-es-%s
  finalizers: [karmada.io/execution-controller]
spec:
  %s
  workload:
    manifests:
    - apiVersion: v1
      kind: ConfigMap
      metadata: {namespace: default, name: first, annotations: {%s}}
      data: {text: %q}
    - apiVersion: v1
      kind: Service
      metadata: {namespace: default, name: second}
      spec: {ports: [{port: 80}], selector: {app: second}}
`

// checkWorks applies a Work with two objects to a member. Each object has a status, is corrected after drift, stays
// unchanged while the Work is suspended, and stays on the member if the Work requires it. An object of another client
// is taken over only if the Work requires it.
func (w *world) checkWorks(plane *localkube.Plane) {
	w.t.Helper()
	pair := func(spec, annotations, text string) {
		w.apply(w.hub, fmt.Sprintf(pairWork, plane.Name, spec, annotations, text))
	}
	// An object of another client, with the same name.
	w.kubectl(plane, "create", "configmap", "first", "--from-literal=text=foreign")
	pair("suspendDispatching: false", "", "ours")
	w.awaitWorkCondition(plane, workv1alpha1.WorkApplied, workv1alpha1.ReasonAppliedFailed, "first")
	w.wantObjectText(plane, "foreign")
	pair("suspendDispatching: false", "work.karmada.io/conflict-resolution: overwrite", "ours")
	w.awaitWorkCondition(plane, workv1alpha1.WorkApplied, workv1alpha1.ReasonAppliedSuccessful, "")
	w.awaitObjectText(plane, "ours")
	w.eventually("both manifests have a status", func() error { return w.wantManifests(plane) })

	w.kubectl(plane, "patch", "configmap", "first", "-p", `{"data":{"text":"drifted"}}`)
	w.awaitObjectText(plane, "ours")
	w.kubectl(plane, "delete", "service", "second")
	w.eventually("the object is recreated", func() error {
		_, err := w.try(plane, "kubectl", "get", "service", "second")
		return err
	})

	pair("suspendDispatching: true", "work.karmada.io/conflict-resolution: overwrite", "later")
	w.awaitWorkCondition(plane, workv1alpha1.WorkDispatching, workv1alpha1.ReasonSuspendDispatching, "")
	w.wantObjectText(plane, "ours")
	pair("suspendDispatching: false", "work.karmada.io/conflict-resolution: overwrite", "later")
	w.awaitObjectText(plane, "later")
	w.awaitWorkCondition(plane, workv1alpha1.WorkDispatching, workv1alpha1.ReasonDispatching, "")

	pair("preserveResourcesOnDeletion: true", "work.karmada.io/conflict-resolution: overwrite", "later")
	w.awaitWorkCondition(plane, workv1alpha1.WorkApplied, workv1alpha1.ReasonAppliedSuccessful, "")
	w.kubectl(w.hub, "delete", "work", "pair", "-n", "karmada-es-"+plane.Name, "--timeout=60s")
	w.wantObjectText(plane, "later")
	for _, object := range []string{"configmap/first", "service/second"} {
		if marks := w.kubectl(plane, "get", object, "-o", "jsonpath={.metadata.labels}{.metadata.annotations}"); strings.Contains(marks, "karmada.io") {
			w.t.Errorf("%s, which stays on %s, still has the marks %s", object, plane.Name, marks)
		}
		w.kubectl(plane, "delete", object)
	}
}

// awaitWorkCondition waits until a condition of the current generation of the Work has a reason, and a message with a
// text.
func (w *world) awaitWorkCondition(plane *localkube.Plane, condition, reason, text string) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("the Work of %s has a condition with reason %s", plane.Name, reason), func() error {
		work, err := w.readWork(plane)
		if err != nil {
			return err
		}
		found := meta.FindStatusCondition(work.Status.Conditions, condition)
		if found == nil || found.ObservedGeneration != work.Generation || found.Reason != reason || !strings.Contains(found.Message, text) {
			return fmt.Errorf("generation %d has conditions %+v, want %s with %q", work.Generation, work.Status.Conditions, reason, text)
		}
		return nil
	})
}

func (w *world) readWork(plane *localkube.Plane) (*workv1alpha1.Work, error) {
	work := &workv1alpha1.Work{}
	return work, w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: "karmada-es-" + plane.Name, Name: "pair"}, work)
}

// wantManifests checks that each manifest of the Work has its status, in order, and is healthy.
func (w *world) wantManifests(plane *localkube.Plane) error {
	work, err := w.readWork(plane)
	if err != nil {
		return err
	}
	var got []string
	for _, m := range work.Status.ManifestStatuses {
		got = append(got, fmt.Sprintf("%d %s/%s %s", m.Identifier.Ordinal, m.Identifier.Resource, m.Identifier.Name, m.Health))
	}
	if want := []string{"0 configmaps/first Healthy", "1 services/second Healthy"}; strings.Join(got, ", ") != strings.Join(want, ", ") {
		return fmt.Errorf("manifestStatuses are %q, want %q", got, want)
	}
	return nil
}

// objectText reads the text of the object of a member.
func (w *world) objectText(plane *localkube.Plane) (string, error) {
	return w.try(plane, "kubectl", "get", "configmap", "first", "-o", "jsonpath={.data.text}")
}

// wantObjectText checks the text of the object of a member.
func (w *world) wantObjectText(plane *localkube.Plane, want string) {
	w.t.Helper()
	if got, err := w.objectText(plane); err != nil || got != want {
		w.t.Errorf("the object on %s has text %q (%v), want %q", plane.Name, got, err, want)
	}
}

// awaitObjectText waits until the object of a member has a text.
func (w *world) awaitObjectText(plane *localkube.Plane, want string) {
	w.t.Helper()
	w.eventually("the object on "+plane.Name+" has text "+want, func() error {
		got, err := w.objectText(plane)
		if err == nil && got != want {
			err = errors.New("its text is " + got)
		}
		return err
	})
}
