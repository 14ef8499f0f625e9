package works_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/event"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/api/crds"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/fleet"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/works"
)

// world is a hub whose controller runs, with one Cluster, which is the hub's own cluster.
type world struct {
	testing.TB
	client.Client
	plane   *localkube.Plane
	cache   client.Reader
	cluster *clusterv1alpha1.Cluster
	objects string
	records string
}

func newWorld(t *testing.T, mode clusterv1alpha1.ClusterSyncMode, change ...func(*hubworks.Controller)) *world {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRDs(t, hub)
	w := &world{TB: t, Client: hub, plane: plane, objects: plane.Namespace(t, "objects"), records: plane.Namespace(t, "records")}
	// Its controller leaves the Clusters of other tests alone, which run at the same time.
	w.enroll(t, w.objects, mode, w.objects)
	w.run(t, append([]func(*hubworks.Controller){func(c *hubworks.Controller) { c.Shard = fleet.Shard(w.objects) }}, change...))
	return w
}

// enroll makes the Cluster.
func (w *world) enroll(t *testing.T, name string, mode clusterv1alpha1.ClusterSyncMode, shard string) {
	t.Helper()
	w.cluster = &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Finalizers: []string{clusterv1alpha1.ClusterFinalizer},
			Annotations: map[string]string{kube.AnnotationHub: "hub", libv1beta1.ShardAnnotation: shard},
		},
		Spec: clusterv1alpha1.ClusterSpec{SyncMode: mode, APIEndpoint: w.plane.Config.Host},
	}
	w.must(w.Create(t.Context(), w.cluster))
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(w.cluster.Name)}}
	w.must(w.Create(t.Context(), space))
	t.Cleanup(func() { w.clean(space) })
}

// sibling returns the same hub with another Cluster of a shard.
func (w *world) sibling(t *testing.T, name, shard string) *world {
	t.Helper()
	other := *w
	other.enroll(t, name, clusterv1alpha1.Push, shard)
	return &other
}

// clean takes away what the test made.
func (w *world) clean(space *corev1.Namespace) {
	ctx := context.WithoutCancel(w.Context())
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))
	var list workv1alpha1.WorkList
	w.must(w.List(ctx, &list, client.InNamespace(space.Name)))
	for i := range list.Items {
		w.must(client.IgnoreNotFound(w.Patch(ctx, &list.Items[i], patch)))
	}
	w.must(client.IgnoreNotFound(w.Patch(ctx, w.cluster, patch)))
	w.must(client.IgnoreNotFound(w.Delete(ctx, w.cluster)))
	w.must(client.IgnoreNotFound(w.Delete(ctx, space)))
}

// run starts the controller, and an engine for each member that it asks for.
func (w *world) run(t *testing.T, change []func(*hubworks.Controller)) {
	t.Helper()
	mgr, err := ctrl.NewManager(w.plane.Config, ctrl.Options{
		Scheme: kube.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	w.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	woken := make(chan event.GenericEvent, 1024)
	var mu sync.Mutex // guards byUID
	byUID := map[string]*engine.Engine{}
	controller := &hubworks.Controller{Hub: mgr.GetClient(), Live: mgr.GetAPIReader(), Woken: woken, Clock: clock.RealClock{}}
	controller.Engines = func(_ context.Context, m fleet.Member) (works.Engine, error) {
		mu.Lock()
		defer mu.Unlock()
		if e := byUID[m.UID]; e != nil {
			return e, nil
		}
		e, err := engine.New(w.plane.Config, engine.Options{Namespace: w.records, Scope: m.Scope, Hub: m.Hub, OnChange: func(id bundle.ID) {
			if news, ok := hubworks.News(m, id); ok {
				woken <- news
			}
		}})
		if err == nil {
			byUID[m.UID] = e
			running.Go(func() { _ = e.Run(ctx) })
		}
		return e, err
	}
	for _, f := range change {
		f(controller)
	}
	w.must(controller.Setup(ctx, mgr))
	w.cache = mgr.GetClient()
	running.Go(func() {
		if err := mgr.Start(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

// crdsOnce serves the tests of this binary, which share a control plane.
var crdsOnce sync.Mutex

func installCRDs(t *testing.T, hub client.Client) {
	t.Helper()
	crdsOnce.Lock()
	defer crdsOnce.Unlock()
	for _, file := range []string{"work.karmada.io_works.yaml", "cluster.karmada.io_clusters.yaml"} {
		raw, err := crds.FS.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(raw, crd); err != nil {
			t.Fatal(err)
		}
		if err := hub.Create(t.Context(), crd); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		return hub.List(ctx, &workv1alpha1.WorkList{}) == nil && hub.List(ctx, &clusterv1alpha1.ClusterList{}) == nil, nil
	})
	if err != nil {
		t.Fatalf("wait for the CRDs: %v", err)
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// ready says on the Cluster that it is reached, or is not.
func (w *world) ready(status metav1.ConditionStatus) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	before := w.cluster.DeepCopy()
	w.cluster.Status.KubernetesVersion = "v1.36.3"
	meta.SetStatusCondition(&w.cluster.Status.Conditions, metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: status, Reason: "Test"})
	w.must(w.Status().Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

// seen waits until the controller can see the Cluster as it is: nobody orders news of it and of its Works.
func (w *world) seen() {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	w.eventually("the cache has the Cluster", func() bool {
		cached := &clusterv1alpha1.Cluster{}
		return w.cache.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), cached) == nil && cached.ResourceVersion == w.cluster.ResourceVersion
	})
}

// work creates a Work as a user does.
func (w *world) work(name, manifest string) {
	w.Helper()
	raw, err := yaml.YAMLToJSON([]byte(strings.ReplaceAll(manifest, "OBJECTS", w.objects)))
	w.must(err)
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.ExecutionSpace(w.cluster.Name), Name: name}}
	work.Spec.Workload.Manifests = []workv1alpha1.Manifest{{RawExtension: runtime.RawExtension{Raw: raw}}}
	w.must(w.Create(w.Context(), work))
}

// get reads a Work; nil if there is none.
func (w *world) get(name string) *workv1alpha1.Work {
	w.Helper()
	work := &workv1alpha1.Work{}
	err := w.Get(w.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(w.cluster.Name), Name: name}, work)
	if apierrors.IsNotFound(err) {
		return nil
	}
	w.must(err)
	return work
}

func (w *world) applied(name string) bool {
	work := w.get(name)
	return work != nil && meta.IsStatusConditionTrue(work.Status.Conditions, workv1alpha1.WorkApplied)
}

// there says whether the ConfigMap of the member is there, and whether it has marks.
func (w *world) there(name string) (there, marked bool) {
	w.Helper()
	var cm corev1.ConfigMap
	err := w.Get(w.Context(), client.ObjectKey{Namespace: w.objects, Name: name}, &cm)
	w.must(client.IgnoreNotFound(err))
	return err == nil, len(cm.Labels)+len(cm.Annotations) > 0
}

func (w *world) eventually(what string, check func() bool) {
	w.Helper()
	err := wait.PollUntilContextTimeout(w.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return check(), nil })
	if err != nil {
		w.Fatalf("%s: %v\n%+v", what, err, w.get("one"))
	}
}

const configMap = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: OBJECTS}, data: {key: one}}"

func TestWorkOfPushCluster(t *testing.T) {
	t.Parallel()
	w := newWorld(t, clusterv1alpha1.Push)
	w.work("one", configMap)
	w.work("two", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: OBJECTS}, spec: {selector: {matchLabels: {app: web}},
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: web, image: "example.com/web:v1"}]}}}}`)
	w.ready(metav1.ConditionTrue)
	w.eventually("applied once the cluster is ready", func() bool { return w.applied("one") })
	// Nobody but the engine tells of the Deployment's status.
	w.eventually("healthy", func() bool {
		statuses := w.get("two").Status.ManifestStatuses
		return len(statuses) == 1 && statuses[0].Health == workv1alpha1.ResourceHealthy
	})
	w.must(w.Delete(t.Context(), w.get("one")))
	w.eventually("withdrawn", func() bool { return w.get("one") == nil })
	if there, _ := w.there("a"); there {
		t.Error("the object is still there")
	}
}

func TestWorkOfPullClusterIsTheAgents(t *testing.T) {
	t.Parallel()
	pull := newWorld(t, clusterv1alpha1.Pull)
	pull.ready(metav1.ConditionTrue)
	pull.work("one", configMap)
	push := newWorld(t, clusterv1alpha1.Push)
	push.ready(metav1.ConditionTrue)
	push.work("one", configMap)
	push.eventually("applied on the other cluster", func() bool { return push.applied("one") })
	if work := pull.get("one"); len(work.Finalizers) > 0 || len(work.Status.Conditions) > 0 {
		t.Errorf("the hub touched it: %v %v", work.Finalizers, work.Status)
	}
}

func TestWorksOfLeavingCluster(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		annotation    string
		ready         metav1.ConditionStatus
		there, marked bool
	}{
		"is withdrawn":                       {ready: metav1.ConditionTrue},
		"is left with --orphan":              {annotation: kube.DeregisterKeep, ready: metav1.ConditionTrue, there: true},
		"is released when it is abandoned":   {annotation: kube.DeregisterForce + "," + kube.DeregisterAbandon, ready: metav1.ConditionTrue, there: true, marked: true},
		"is withdrawn when it goes by force": {annotation: kube.DeregisterForce, ready: metav1.ConditionTrue},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, clusterv1alpha1.Push)
			w.ready(metav1.ConditionTrue)
			w.work("one", configMap)
			w.eventually("applied", func() bool { return w.applied("one") })
			w.ready(test.ready)
			patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, kube.AnnotationDeregister, test.annotation)
			w.must(w.Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(patch))))
			w.must(w.Delete(t.Context(), w.cluster))
			w.seen()
			w.must(w.Delete(t.Context(), w.get("one")))
			w.eventually("let go", func() bool { return w.get("one") == nil })
			if there, marked := w.there("a"); there != test.there || marked != test.marked {
				t.Errorf("object there: %v, marked: %v; want %v, %v", there, marked, test.there, test.marked)
			}
		})
	}
}

func TestWorkOfNoClusterIsLetGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, clusterv1alpha1.Push, func(c *hubworks.Controller) { c.Shard = "" }).sibling(t, "let-go", "")
	w.ready(metav1.ConditionTrue)
	w.work("one", configMap)
	w.eventually("applied", func() bool { return w.applied("one") })
	w.must(w.Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	w.must(w.Delete(t.Context(), w.cluster))
	w.must(w.Delete(t.Context(), w.get("one")))
	w.eventually("let go", func() bool { return w.get("one") == nil })
}

func TestNoStatusReleasesWorks(t *testing.T) {
	t.Parallel()
	taken := func(s *clusterv1alpha1.ClusterStatus) {
		s.Conditions[0].Status, s.Conditions[0].Reason, s.Conditions[0].Message = metav1.ConditionFalse, fleet.ReasonTaken, "another one has the id"
	}
	// say gives the Cluster a status that is not true.
	tests := map[string]struct {
		say     func(*clusterv1alpha1.ClusterStatus)
		leaving bool
	}{
		"cleared while it leaves":   {func(s *clusterv1alpha1.ClusterStatus) { *s = clusterv1alpha1.ClusterStatus{} }, true},
		"not ready while it leaves": {func(s *clusterv1alpha1.ClusterStatus) { s.Conditions[0].Status = metav1.ConditionFalse }, true},
		"refused while it leaves":   {taken, true},
		"cleared":                   {func(s *clusterv1alpha1.ClusterStatus) { *s = clusterv1alpha1.ClusterStatus{} }, false},
		"refused":                   {taken, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, clusterv1alpha1.Push)
			w.ready(metav1.ConditionTrue)
			w.work("one", configMap)
			w.eventually("applied", func() bool { return w.applied("one") })
			w.must(w.Get(t.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
			test.say(&w.cluster.Status)
			w.must(w.Status().Update(t.Context(), w.cluster))
			if test.leaving {
				w.must(w.Delete(t.Context(), w.cluster))
			}
			w.seen()
			w.must(w.Delete(t.Context(), w.get("one")))
			if !test.leaving {
				w.work("two", strings.ReplaceAll(configMap, "name: a", "name: b"))
				w.eventually("the controller has seen the status", func() bool { return len(w.get("two").Status.Conditions) > 0 })
			}
			w.ready(metav1.ConditionTrue)
			w.eventually("withdrawn", func() bool { return w.get("one") == nil })
			if there, _ := w.there("a"); there {
				t.Error("the object is left on the cluster")
			}
		})
	}
}
