package works_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/works"
)

func TestReplicasAreRetained(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	executor := &works.Executor{Hub: w.Client, Engine: w.runEngine(t), Clock: clock.RealClock{}}
	retaining := func(replicas int, tag, retain string) string {
		text := strings.Replace(deployment, "  namespace: OBJECTS\n", "  namespace: OBJECTS\n  labels: {resourcetemplate.karmada.io/retain-replicas: '"+retain+"'}\n", 1)
		text = strings.Replace(text, "replicas: 2", fmt.Sprintf("replicas: %d", replicas), 1)
		return strings.Replace(text, "web:v1", "web:"+tag, 1)
	}
	web := func() *appsv1.Deployment {
		obj := &appsv1.Deployment{}
		w.noError(w.Get(t.Context(), client.ObjectKey{Namespace: w.objects, Name: "web"}, obj))
		return obj
	}
	update := func(replicas int, tag, retain string) {
		t.Helper()
		w.updateWork("one", func(work *workv1alpha1.Work) {
			work.Spec.Workload.Manifests = []workv1alpha1.Manifest{w.manifest(retaining(replicas, tag, retain))}
		})
		w.noError(executor.Execute(t.Context(), w.getWork("one"), reachable))
	}
	want := func(replicas int32, tag string) {
		t.Helper()
		obj := web()
		if got := obj.Spec.Template.Spec.Containers[0].Image; *obj.Spec.Replicas != replicas || got != "example.com/web:"+tag {
			t.Errorf("got %d replicas of %s, want %d of %s", *obj.Spec.Replicas, got, replicas, tag)
		}
	}
	w.createWork("one", retaining(2, "v1", "true"))
	w.noError(executor.Execute(t.Context(), w.getWork("one"), reachable))
	want(2, "v1")
	// The cluster has not changed the replicas yet.
	update(5, "v2", "true")
	want(2, "v2")

	w.noError(w.SubResource("scale").Update(t.Context(), web(), client.WithSubResourceBody(&autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: 3}})))
	w.staysTrue("scaled", 2*time.Second, func() bool { return *web().Spec.Replicas == 3 })
	update(6, "v3", "true")
	want(3, "v3")
	// Drift of other fields is corrected.
	drift := `{"spec":{"replicas":0,"template":{"spec":{"containers":[{"name":"web","image":"example.com/web:other"}]}}}}`
	w.noError(w.Patch(t.Context(), web(), client.RawPatch(types.StrategicMergePatchType, []byte(drift))))
	w.eventually("healed", func() bool { return web().Spec.Template.Spec.Containers[0].Image == "example.com/web:v3" })
	want(0, "v3")

	update(6, "v3", "false")
	want(6, "v3")
}
