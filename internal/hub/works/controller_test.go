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
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
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

// testEnv is a hub with a running controller and one Cluster, which is the cluster of the hub itself.
type testEnv struct {
	testing.TB
	client.Client
	plane   *localkube.Plane
	cache   client.Reader
	cluster *clusterv1alpha1.Cluster
	objects string
	records string
	// requests are the requests of the engines.
	requests *requestLog
}

func newTestEnv(t *testing.T, mode clusterv1alpha1.ClusterSyncMode, change ...func(*hubworks.Controller)) *testEnv {
	t.Helper()
	plane := localkube.Shared(t)
	hub, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	installCRDs(t, hub)
	w := &testEnv{TB: t, Client: hub, plane: plane, objects: plane.Namespace(t, "objects"), records: plane.Namespace(t, "records"), requests: &requestLog{}}
	// Its controller ignores the Clusters of concurrent tests.
	w.createCluster(t, w.objects, mode, w.objects)
	w.run(t, append([]func(*hubworks.Controller){func(c *hubworks.Controller) { c.Shard = fleet.Shard(w.objects) }}, change...))
	return w
}

// createCluster creates the Cluster and its execution namespace.
func (w *testEnv) createCluster(t *testing.T, name string, mode clusterv1alpha1.ClusterSyncMode, shard string) {
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
	t.Cleanup(func() { w.cleanUp(space) })
}

// withCluster returns the same hub with another Cluster in a shard.
func (w *testEnv) withCluster(t *testing.T, name, shard string) *testEnv {
	t.Helper()
	other := *w
	other.createCluster(t, name, clusterv1alpha1.Push, shard)
	return &other
}

// cleanUp deletes the objects of the test.
func (w *testEnv) cleanUp(space *corev1.Namespace) {
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

// run starts the controller, and an engine for each requested member.
func (w *testEnv) run(t *testing.T, change []func(*hubworks.Controller)) {
	t.Helper()
	mgr, err := ctrl.NewManager(w.plane.Config, ctrl.Options{
		// As in the hub, the Works in the cache have no manifestStatuses.
		Scheme: kube.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{DefaultTransform: func(obj any) (any, error) {
			if work, ok := obj.(*workv1alpha1.Work); ok {
				work.Status.ManifestStatuses = nil
			}
			return obj, nil
		}}, Controller: config.Controller{
			SkipNameValidation: ptr.To(true),
			// The priority queue of controller-runtime 0.24.1 can deadlock if it shuts down while items are ready.
			UsePriorityQueue: ptr.To(false),
		},
	})
	w.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	memberConfig := rest.CopyConfig(w.plane.Config)
	memberConfig.Wrap(w.requests.wrap)
	changes := make(chan event.GenericEvent, 1024)
	var mu sync.Mutex // guards byUID
	byUID := map[string]*engine.Engine{}
	controller := &hubworks.Controller{Hub: mgr.GetClient(), Live: mgr.GetAPIReader(), Changes: changes, Clock: clock.RealClock{}}
	controller.Engines = func(_ context.Context, m fleet.Member) (works.Engine, error) {
		mu.Lock()
		defer mu.Unlock()
		if e := byUID[m.UID]; e != nil {
			return e, nil
		}
		onChange := func(id bundle.ID) {
			if changeEvent, ok := hubworks.ChangeEvent(m, id); ok {
				changes <- changeEvent
			}
		}
		e, err := engine.New(memberConfig, engine.Options{Namespace: w.records, Scope: m.Scope, Hub: m.Hub, OnReport: onChange, OnChange: onChange})
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

// crdsLock serializes the installation of CRDs, since the tests share a control plane.
var crdsLock sync.Mutex

func installCRDs(t *testing.T, hub client.Client) {
	t.Helper()
	crdsLock.Lock()
	defer crdsLock.Unlock()
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

func (w *testEnv) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// setReady sets the Ready condition of the Cluster.
func (w *testEnv) setReady(status metav1.ConditionStatus) {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	before := w.cluster.DeepCopy()
	w.cluster.Status.KubernetesVersion = "v1.36.3"
	meta.SetStatusCondition(&w.cluster.Status.Conditions, metav1.Condition{Type: clusterv1alpha1.ClusterConditionReady, Status: status, Reason: "Test"})
	w.must(w.Status().Patch(w.Context(), w.cluster, client.MergeFrom(before)))
}

// waitCached waits until the controller's cache has the current Cluster, since watches on Clusters and Works have no
// common order.
func (w *testEnv) waitCached() {
	w.Helper()
	w.must(w.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
	w.eventually("the cache has the Cluster", func() bool {
		cached := &clusterv1alpha1.Cluster{}
		return w.cache.Get(w.Context(), client.ObjectKeyFromObject(w.cluster), cached) == nil && cached.ResourceVersion == w.cluster.ResourceVersion
	})
}

// createWork creates a Work as a user does.
func (w *testEnv) createWork(name, manifest string) {
	w.Helper()
	raw, err := yaml.YAMLToJSON([]byte(strings.ReplaceAll(manifest, "OBJECTS", w.objects)))
	w.must(err)
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.ExecutionSpace(w.cluster.Name), Name: name}}
	work.Spec.Workload.Manifests = []workv1alpha1.Manifest{{RawExtension: runtime.RawExtension{Raw: raw}}}
	w.must(w.Create(w.Context(), work))
}

// get reads a Work; nil if it does not exist.
func (w *testEnv) get(name string) *workv1alpha1.Work {
	w.Helper()
	work := &workv1alpha1.Work{}
	err := w.Get(w.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(w.cluster.Name), Name: name}, work)
	if apierrors.IsNotFound(err) {
		return nil
	}
	w.must(err)
	return work
}

func (w *testEnv) isApplied(name string) bool {
	work := w.get(name)
	return work != nil && meta.IsStatusConditionTrue(work.Status.Conditions, workv1alpha1.WorkApplied)
}

// configMap returns whether the ConfigMap exists on the member, and whether it has ownership labels or annotations.
func (w *testEnv) configMap(name string) (there, marked bool) {
	w.Helper()
	var cm corev1.ConfigMap
	err := w.Get(w.Context(), client.ObjectKey{Namespace: w.objects, Name: name}, &cm)
	w.must(client.IgnoreNotFound(err))
	return err == nil, len(cm.Labels)+len(cm.Annotations) > 0
}

func (w *testEnv) eventually(what string, check func() bool) {
	w.Helper()
	err := wait.PollUntilContextTimeout(w.Context(), 20*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return check(), nil })
	if err != nil {
		w.Fatalf("%s: %v\n%+v", what, err, w.get("one"))
	}
}

const configMapManifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a, namespace: OBJECTS}, data: {key: one}}"

func TestWorkOfPushCluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, clusterv1alpha1.Push)
	w.createWork("one", configMapManifest)
	w.createWork("two", `{apiVersion: apps/v1, kind: Deployment, metadata: {name: web, namespace: OBJECTS}, spec: {selector: {matchLabels: {app: web}},
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: web, image: "example.com/web:v1"}]}}}}`)
	w.setReady(metav1.ConditionTrue)
	w.eventually("applied after the cluster is ready", func() bool { return w.isApplied("one") })
	// Only the engine reports the Deployment's status.
	w.eventually("healthy", func() bool {
		statuses := w.get("two").Status.ManifestStatuses
		return len(statuses) == 1 && statuses[0].Health == workv1alpha1.ResourceHealthy
	})
	w.must(w.Delete(t.Context(), w.get("one")))
	w.eventually("withdrawn", func() bool { return w.get("one") == nil })
	if there, _ := w.configMap("a"); there {
		t.Error("the object still exists")
	}
}

func TestHubIgnoresWorkOfPullCluster(t *testing.T) {
	t.Parallel()
	pull := newTestEnv(t, clusterv1alpha1.Pull)
	pull.setReady(metav1.ConditionTrue)
	pull.createWork("one", configMapManifest)
	push := newTestEnv(t, clusterv1alpha1.Push)
	push.setReady(metav1.ConditionTrue)
	push.createWork("one", configMapManifest)
	push.eventually("applied on the other cluster", func() bool { return push.isApplied("one") })
	if work := pull.get("one"); len(work.Finalizers) > 0 || len(work.Status.Conditions) > 0 {
		t.Errorf("the hub has changed it: %v %v", work.Finalizers, work.Status)
	}
}

func TestWorksOfRemovedCluster(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		annotation    string
		ready         metav1.ConditionStatus
		there, marked bool
	}{
		"is withdrawn":                            {ready: metav1.ConditionTrue},
		"is kept with --orphan":                   {annotation: kube.DeregisterKeep, ready: metav1.ConditionTrue, there: true},
		"is released when it is abandoned":        {annotation: kube.DeregisterForce + "," + kube.DeregisterAbandon, ready: metav1.ConditionTrue, there: true, marked: true},
		"is withdrawn when the removal is forced": {annotation: kube.DeregisterForce, ready: metav1.ConditionTrue},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestEnv(t, clusterv1alpha1.Push)
			w.setReady(metav1.ConditionTrue)
			w.createWork("one", configMapManifest)
			w.eventually("applied", func() bool { return w.isApplied("one") })
			w.setReady(test.ready)
			patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, kube.AnnotationDeregister, test.annotation)
			w.must(w.Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(patch))))
			w.must(w.Delete(t.Context(), w.cluster))
			w.waitCached()
			w.must(w.Delete(t.Context(), w.get("one")))
			w.eventually("released", func() bool { return w.get("one") == nil })
			if there, marked := w.configMap("a"); there != test.there || marked != test.marked {
				t.Errorf("object exists: %v, marked: %v; want %v, %v", there, marked, test.there, test.marked)
			}
		})
	}
}

func TestWorkOfDeletedClusterIsReleased(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, clusterv1alpha1.Push, func(c *hubworks.Controller) { c.Shard = "" }).withCluster(t, "let-go", "")
	w.setReady(metav1.ConditionTrue)
	w.createWork("one", configMapManifest)
	w.eventually("applied", func() bool { return w.isApplied("one") })
	w.must(w.Patch(t.Context(), w.cluster, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	w.must(w.Delete(t.Context(), w.cluster))
	w.must(w.Delete(t.Context(), w.get("one")))
	w.eventually("released", func() bool { return w.get("one") == nil })
}

func TestNoStatusReleasesWorks(t *testing.T) {
	t.Parallel()
	taken := func(s *clusterv1alpha1.ClusterStatus) {
		s.Conditions[0].Status, s.Conditions[0].Reason, s.Conditions[0].Message = metav1.ConditionFalse, fleet.ReasonIDTaken, "another cluster has the ID"
	}
	// setStatus sets a status that is not true.
	tests := map[string]struct {
		say     func(*clusterv1alpha1.ClusterStatus)
		leaving bool
	}{
		"cleared during removal":   {func(s *clusterv1alpha1.ClusterStatus) { *s = clusterv1alpha1.ClusterStatus{} }, true},
		"not ready during removal": {func(s *clusterv1alpha1.ClusterStatus) { s.Conditions[0].Status = metav1.ConditionFalse }, true},
		"refused during removal":   {taken, true},
		"cleared":                  {func(s *clusterv1alpha1.ClusterStatus) { *s = clusterv1alpha1.ClusterStatus{} }, false},
		"refused":                  {taken, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newTestEnv(t, clusterv1alpha1.Push)
			w.setReady(metav1.ConditionTrue)
			w.createWork("one", configMapManifest)
			w.eventually("applied", func() bool { return w.isApplied("one") })
			w.must(w.Get(t.Context(), client.ObjectKeyFromObject(w.cluster), w.cluster))
			test.say(&w.cluster.Status)
			w.must(w.Status().Update(t.Context(), w.cluster))
			if test.leaving {
				w.must(w.Delete(t.Context(), w.cluster))
			}
			w.waitCached()
			w.must(w.Delete(t.Context(), w.get("one")))
			if !test.leaving {
				w.createWork("two", strings.ReplaceAll(configMapManifest, "name: a", "name: b"))
				w.eventually("the controller has seen the status", func() bool { return len(w.get("two").Status.Conditions) > 0 })
			}
			w.setReady(metav1.ConditionTrue)
			w.eventually("withdrawn", func() bool { return w.get("one") == nil })
			if there, _ := w.configMap("a"); there {
				t.Error("the object is still on the cluster")
			}
		})
	}
}
