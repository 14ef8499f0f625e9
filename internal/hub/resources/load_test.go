package resources_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/source"
)

// TestOtherReadersLeaveTheReferences reads the objects of a summary with an older spec, as the check for newer charts
// can: changes of the objects that the reconcile has loaded are still reported, and nothing else is watched.
func TestOtherReadersLeaveTheReferences(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	settings, former := configMap("settings", "one"), configMap("former", "one")
	w.create(settings)
	w.create(former)
	w.mustLoad("reader", w.ref("ConfigMap", "settings"))
	for name, ref := range map[string]configv1beta1.TemplateResourceRef{"of the summary": w.ref("ConfigMap", "settings"), "former": w.ref("ConfigMap", "former")} {
		got, err := w.Read(t.Context(), []configv1beta1.TemplateResourceRef{ref}, w.templateContext())
		if err != nil || !strings.Contains(string(got.Objects["x"]), `"value":"one"`) {
			t.Errorf("the reference %s: got %s, %v", name, got.Objects["x"], err)
		}
	}
	former.Data["value"] = "two"
	w.update(former)
	settings.Data["value"] = "two"
	w.update(settings)
	w.wantAllChanged("reader")
	if got := w.mustLoad("reader", w.ref("ConfigMap", "settings")); !strings.Contains(got, `"value":"two"`) {
		t.Errorf("after the change: got %s", got)
	}
}

// TestObjectDeletedBeforeTheFirstList deletes an object after it was read, and before the informer of its kind lists
// it: the informer never has it, and reports no deletion.
func TestObjectDeletedBeforeTheFirstList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	definition := w.boats()
	w.install(definition)
	anna := w.boat("anna")
	for deadline := time.Now().Add(time.Minute); ; <-time.After(50 * time.Millisecond) { // until the kind is served
		anna.SetNamespace(w.namespace)
		err := w.hub.Create(t.Context(), anna)
		if err == nil {
			break
		}
		if !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) || time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	w.listing.Lock()
	if got := w.mustLoad("reader", w.ref("Boat", "anna")); !strings.Contains(got, `"crew":1`) {
		t.Errorf("got %s", got)
	}
	if err := w.hub.Delete(t.Context(), anna); err != nil {
		t.Fatal(err)
	}
	w.listing.Unlock()
	w.wantChanged("reader")
	if _, err := w.load("reader", w.ref("Boat", "anna")); !errors.Is(err, source.ErrNotFound) {
		t.Errorf("after the deletion: got %v", err)
	}
}

// TestDigestNamesTheContent changes a field that is not relevant, and refers to the object again: another content has
// another digest, so that a cached rendering of the former content is not used.
func TestDigestNamesTheContent(t *testing.T) {
	t.Parallel()
	settings := configMap("settings", "one")
	settings.Namespace = "fleet"
	mapper := testrestmapper.TestOnlyStaticRESTMapper(kube.Scheme())
	w := &world{T: t, namespace: "fleet", hub: fake.NewClientBuilder().WithScheme(kube.Scheme()).WithRESTMapper(mapper).WithObjects(settings).Build()}
	w.Watcher = resources.New(w.hub, nil, nil) // it is not started
	ref := w.ref("ConfigMap", "settings", func(r *configv1beta1.TemplateResourceRef) { r.WatchFields = []string{"metadata.labels.size"} })
	before, err := w.load("reader", ref)
	if err != nil {
		t.Fatal(err)
	}
	changed := configMap("settings", "two")
	changed.Namespace = "fleet"
	w.update(changed)
	w.Forget(types.NamespacedName{Namespace: "fleet", Name: "reader"})
	after, err := w.load("reader", ref)
	if err != nil || !strings.Contains(string(after.Objects["x"]), `"value":"two"`) || after.Digest == before.Digest {
		t.Errorf("got %s with digest %s, %v; before: digest %s", after.Objects["x"], after.Digest, err, before.Digest)
	}
}
