package summaries

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta/testrestmapper"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/hub/slots"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// restarts is a hub with one summary. Each reconcile is the first one after a restart of the hub. It is also the
// transport to the member, which applies every bundle, and the reader of content.
type restarts struct {
	references *referenceIndex // nil: the Controller has an empty one
	deliver.Transport
	client.Reader
	t           *testing.T
	hub         client.Client
	codeVersion string
	// feature is the only feature of the summary.
	feature    libv1beta1.FeatureID
	deployed   map[bundle.ID]bundle.Deployed
	deliveries int
	reads      int
	// isCacheBehind is true while the cache of metadata lacks all objects.
	isCacheBehind bool
	remote        *source.RemoteFetcher
	// isLocal is true if the bundles are deployed to the hub instead of the member.
	isLocal bool
	// refusal is the error of each delivery, if it is not nil.
	refusal error
	// isKilled is true if the hub is killed before it writes the ClusterConfiguration.
	isKilled bool
	// lastApplied is the time at which the member applies bundles. Default: now.
	lastApplied time.Time
	// queue is the queue of the controller.
	queue priorityqueue.PriorityQueue[reconcile.Request]
	// pool is Composer.Sandbox. Default: the pool that all tests share.
	pool *sandbox.Pool
	// memberConfig is Composer.MemberConfig.
	memberConfig map[fleet.Mode]func(context.Context, fleet.Member) (*rest.Config, error)
}

var resourcesID = bundle.ID{RequestorKind: configv1beta1.ClusterSummaryKind, RequestorName: "web-one", Feature: string(libv1beta1.FeatureResources)}

func newRestarts(t *testing.T) *restarts {
	t.Helper()
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one", UID: "c", Finalizers: []string{kube.FinalizerCluster}}}
	cluster.Spec.PullMode, cluster.Status.Ready = true, true
	cluster.Status.Version, cluster.Status.APIVersions = "v1.36.0", []string{"apps/v1", "v1"}
	isController := true
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{
		Namespace: "fleet", Name: "web-one", UID: "s", Generation: 1, Finalizers: []string{configv1beta1.ClusterSummaryFinalizer},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: configv1beta1.GroupVersion.String(), Kind: configv1beta1.ClusterProfileKind, Name: "web", UID: "p", Controller: &isController}},
	}}
	summary.Spec.ClusterNamespace, summary.Spec.ClusterName, summary.Spec.ClusterType = "fleet", "one", libv1beta1.ClusterTypeSveltos
	summary.Spec.ClusterProfileSpec.SyncMode = configv1beta1.SyncModeContinuous
	summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{
		{Kind: "ConfigMap", Namespace: "fleet", Name: "content"}, {Kind: "ConfigMap", Namespace: "fleet", Name: "optional", Optional: true},
	}
	hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithRESTMapper(testrestmapper.TestOnlyStaticRESTMapper(kube.Scheme())).WithStatusSubresource(summary, cluster, &configv1beta1.ClusterConfiguration{}).
		WithIndex(&corev1.Secret{}, generatedIndex, generatedOwnerUIDs).WithIndex(summary, ProfileIndex, ProfileIndexKeys).WithIndex(summary, ClusterIndex, func(obj client.Object) []string {
		return []string{match.MemberID(obj.(*configv1beta1.ClusterSummary)).String()}
	}).WithObjects(cluster, summary, content("content", "1"), content("optional", "1")).Build()
	r := &restarts{t: t, hub: hub, Reader: hub, codeVersion: "v1", feature: libv1beta1.FeatureResources, deployed: map[bundle.ID]bundle.Deployed{}}
	r.queue = priorityqueue.New[reconcile.Request]("summaries")
	t.Cleanup(r.queue.ShutDown)
	r.reconcile()
	return r
}

func content(name, value string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string]string{
		"objects.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: " + name + "}\ndata: {value: '" + value + "'}\n",
	}}
}

// Get counts the reads of content.
func (r *restarts) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	r.reads++
	return r.hub.Get(ctx, key, obj, opts...)
}

func (r *restarts) metadata() client.Reader {
	if r.isCacheBehind {
		return fake.NewClientBuilder().WithScheme(kube.Scheme()).WithIndex(&corev1.Secret{}, generatedIndex, generatedOwnerUIDs).Build()
	}
	return r.hub
}

func (r *restarts) Deliver(_ context.Context, _ fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	digest, err := b.Digest()
	r.deliveries++
	if r.refusal != nil {
		return bundle.Report{ID: b.ID, State: bundle.StatePending}, r.refusal
	}
	if former := r.deployed[b.ID]; former.Report.Digest != digest || former.Report.State != bundle.StateApplied || former.Removing {
		report := bundle.Report{ID: b.ID, Digest: digest, State: bundle.StateApplied, LastApplied: cmp.Or(r.lastApplied, time.Now())}
		r.deployed[b.ID] = bundle.Deployed{ID: b.ID, Inputs: b.Inputs, CorrectDrift: b.Options.CorrectDrift, Report: report, Releases: b.DeployedReleases()}
	} else if b.Inputs != "" {
		former.Inputs = b.Inputs
		r.deployed[b.ID] = former
	}
	return r.deployed[b.ID].Report, err
}

func (r *restarts) FindDeployed(_ context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	if (m.Mode == fleet.Local) != r.isLocal {
		return bundle.Deployed{}, false, nil
	}
	deployed, ok := r.deployed[id]
	return deployed, ok, nil
}

// reconcile restarts the hub, and reconciles the summary. It returns the status of the feature.
func (r *restarts) reconcile() configv1beta1.FeatureSummary {
	r.t.Helper()
	r.reads, r.deliveries = 0, 0
	c := &Controller{
		Hub: r.hub, Live: r.hub, metadata: r.metadata(), Transport: r, Configurations: NewConfigurations(r.hub, r.hub, ""), references: cmp.Or(r.references, newReferenceIndex()),
		Resources: resources.New(r.hub, nil, nil), Events: events.NewFakeRecorder(100), Clock: clock.RealClock{}, normalEvents: newEventLimiter(),
		Composer: newTestComposer(r), slots: slots.New(), raisedProfiles: lru.New(maxRaised),
	}
	c.slots.Queue = r.queue
	summary := r.summary()
	member, cluster, _, err := c.findMember(r.t.Context(), summary)
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := c.reconcileSummary(r.t.Context(), newState(summary, cluster, member)); err != nil {
		r.t.Logf("reconcile: %v", err)
	}
	if !r.isKilled {
		r.must(c.Configurations.writeAll(r.t.Context()))
	}
	return status.FeatureOf(r.summary().Status, r.feature)
}

func newTestComposer(r *restarts) *Composer {
	charts, err := source.NewCharts(r.t.TempDir(), clock.RealClock{}) // a restarted hub must fetch charts again
	r.must(err)
	return &Composer{
		Charts: charts, Renderer: render.NewCharts(nil), MemberConfig: r.memberConfig,
		ListDeployed: func(context.Context, fleet.Member) ([]bundle.Deployed, error) { return nil, nil },
		Contents:     &source.Contents{Hub: r, Remote: r.remote}, Objects: r, Hub: r.hub, Manifests: render.NewManifestRenderer(), Changer: render.NewChanger(nil), HubUID: "hub", CodeVersion: r.codeVersion,
		Kustomizations: render.NewKustomizationRenderer(pool), Sandbox: cmp.Or(r.pool, pool),
	}
}

func (r *restarts) summary() *configv1beta1.ClusterSummary {
	summary := &configv1beta1.ClusterSummary{}
	if err := r.hub.Get(r.t.Context(), client.ObjectKey{Namespace: "fleet", Name: "web-one"}, summary); err != nil {
		r.t.Fatal(err)
	}
	return summary
}

func (r *restarts) update(obj client.Object, change func()) {
	if err := r.hub.Get(r.t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
		r.t.Fatal(err)
	}
	change()
	if err := r.hub.Update(r.t.Context(), obj); err != nil {
		r.t.Fatal(err)
	}
}

func (r *restarts) must(err error) {
	if err != nil {
		r.t.Fatal(err)
	}
}

func TestUnchangedSummaryIsNotBuiltAgain(t *testing.T) {
	t.Parallel()
	cluster := func() *libv1beta1.SveltosCluster {
		return &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "one"}}
	}
	label := func(r *restarts) {
		one := cluster()
		r.update(one, func() { one.Labels = map[string]string{"env": "prod"} })
	}
	useTemplate := func(r *restarts) {
		c := content("content", "")
		r.update(c, func() {
			c.Annotations = map[string]string{libv1beta1.TemplateAnnotation: ""}
			c.Data = content("content", "{{ .ClusterName }}").Data
		})
	}
	useResource := func(r *restarts) {
		useTemplate(r)
		settings := content("settings", "1")
		settings.Labels = map[string]string{"size": "1"}
		r.must(r.hub.Create(r.t.Context(), settings))
		s := r.summary()
		s.Generation++
		s.Spec.ClusterProfileSpec.TemplateResourceRefs = []configv1beta1.TemplateResourceRef{
			{Identifier: "Settings", Resource: corev1.ObjectReference{Kind: "ConfigMap", Name: "settings"}, WatchFields: []string{"metadata.labels.size"}},
		}
		r.must(r.hub.Update(r.t.Context(), s))
	}
	patches := func(value string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "patches"}, Data: map[string]string{
			"a": "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: content}\ndata: {a: " + value + "}",
		}}
	}
	usePatches := func(r *restarts) {
		r.must(r.hub.Create(r.t.Context(), patches("b")))
		s := r.summary()
		s.Generation++
		s.Spec.ClusterProfileSpec.PatchesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Name: "patches"}}
		r.must(r.hub.Update(r.t.Context(), s))
	}
	usePatchTemplate := func(r *restarts) {
		s := r.summary()
		s.Generation++
		s.Spec.ClusterProfileSpec.Patches = []libv1beta1.Patch{{Patch: "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .ClusterName }}'}"}}
		r.must(r.hub.Update(r.t.Context(), s))
	}
	for name, test := range map[string]struct {
		// prepare is called before the bundle is delivered a second time, change before the restart.
		prepare, change func(r *restarts)
		isBuilt         bool
		want            libv1beta1.FeatureStatus // default: Provisioned
	}{
		"nothing": {},
		"the status is lost": {isBuilt: true, change: func(r *restarts) {
			s := r.summary()
			s.Status = configv1beta1.ClusterSummaryStatus{}
			r.must(r.hub.Status().Update(r.t.Context(), s))
		}},
		"a label without templates": {change: label},
		"a label with templates":    {isBuilt: true, change: label, prepare: useTemplate},
		"a heartbeat with templates": {
			prepare: useTemplate,
			change: func(r *restarts) {
				one := cluster()
				r.update(one, func() {})
				one.Status.AgentLastReportTime = &metav1.Time{Time: time.Now()}
				r.must(r.hub.Status().Update(r.t.Context(), one))
			},
		},
		"content": {isBuilt: true, change: func(r *restarts) {
			c := content("content", "")
			r.update(c, func() { c.Data = content("content", "2").Data })
		}},
		"a deleted optional reference":     {isBuilt: true, change: func(r *restarts) { r.must(r.hub.Delete(r.t.Context(), content("optional", ""))) }},
		"an optional reference to nothing": {isBuilt: true, prepare: func(r *restarts) { r.must(r.hub.Delete(r.t.Context(), content("optional", ""))) }},
		// Content that the cache does not have yet is read from the API server.
		"a cache that was behind": {
			isBuilt: true, want: libv1beta1.FeatureStatusFailed,
			prepare: func(r *restarts) {
				delete(r.deployed, resourcesID)
				r.isCacheBehind = true
				r.reconcile()
				r.isCacheBehind = false
			},
			change: func(r *restarts) { r.must(r.hub.Delete(r.t.Context(), content("content", ""))) },
		},
		"patches that do not change": {prepare: usePatches},
		"patches": {isBuilt: true, prepare: usePatches, change: func(r *restarts) {
			c := patches("")
			r.update(c, func() { c.Data = patches("c").Data })
		}},
		"a label with a template in a patch": {isBuilt: true, change: label, prepare: usePatchTemplate},
		"missing content": {isBuilt: true, want: libv1beta1.FeatureStatusFailed, change: func(r *restarts) {
			r.must(r.hub.Delete(r.t.Context(), content("content", "")))
		}},
		"an object for templates": {isBuilt: true, prepare: useResource, change: func(r *restarts) {
			c := content("settings", "")
			r.update(c, func() { c.Labels["size"] = "2" })
		}},
		// After a restart, templates see the object as it is.
		"a field of it that is not watched": {isBuilt: true, prepare: useResource, change: func(r *restarts) {
			c := content("settings", "")
			r.update(c, func() { c.Data = content("settings", "2").Data })
		}},
		"the spec": {isBuilt: true, change: func(r *restarts) {
			s := r.summary()
			s.Generation++
			s.Spec.ClusterProfileSpec.ContinueOnError = true
			r.must(r.hub.Update(r.t.Context(), s))
		}},
		"a summary that is created again": {isBuilt: true, change: func(r *restarts) {
			s := r.summary()
			s.UID = "s2"
			r.must(r.hub.Update(r.t.Context(), s))
		}},
		"the owner": {isBuilt: true, change: func(r *restarts) {
			s := r.summary()
			s.OwnerReferences[0].Name = "other"
			r.must(r.hub.Update(r.t.Context(), s))
		}},
		"the program": {isBuilt: true, change: func(r *restarts) { r.codeVersion = "v2" }},
		"no version of the code": {isBuilt: true, prepare: func(r *restarts) {
			r.codeVersion = ""
			c := content("content", "")
			r.update(c, func() { c.Data = content("content", "2").Data })
		}},
		"a failure on the member": {isBuilt: true, change: func(r *restarts) {
			d := r.deployed[resourcesID]
			d.Report.State = bundle.StateFailed
			r.deployed[resourcesID] = d
		}},
		"a withdrawal": {isBuilt: true, change: func(r *restarts) {
			d := r.deployed[resourcesID]
			d.Removing = true
			r.deployed[resourcesID] = d
		}},
		"a lost group": {isBuilt: true, change: func(r *restarts) { delete(r.deployed, resourcesID) }},
		"a group without a digest": {isBuilt: true, change: func(r *restarts) {
			d := r.deployed[resourcesID]
			d.Inputs = ""
			r.deployed[resourcesID] = d
		}},
		"a lost ClusterConfiguration": {isBuilt: true, change: func(r *restarts) {
			key := ConfigurationKey(fleet.Member{Type: fleet.TypeSveltos, Namespace: "fleet", Name: "one"})
			r.must(r.hub.Delete(r.t.Context(), &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}))
		}},
		// The objects of the new bundle are not recorded yet, also if it was applied in the same second as the former one.
		"a digest that the status does not have": {isBuilt: true, change: func(r *restarts) {
			s := r.summary()
			s.Status.FeatureSummaries[0].Hash = []byte("former")
			r.must(r.hub.Status().Update(r.t.Context(), s))
		}},
		"push mode": {prepare: func(r *restarts) {
			one := cluster()
			r.update(one, func() { one.Spec.PullMode = false })
		}},
		"a release that must be rendered again": {isBuilt: true, change: func(r *restarts) {
			d := r.deployed[resourcesID]
			d.Report.Outdated = []bundle.OutdatedRelease{{Namespace: "site", Name: "web"}}
			r.deployed[resourcesID] = d
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRestarts(t)
			if test.prepare != nil {
				test.prepare(r)
				r.reconcile()
			}
			if test.change != nil {
				test.change(r)
			}
			want := libv1beta1.FeatureStatusProvisioned
			if test.want != "" {
				want = test.want
			}
			if got := r.reconcile(); got.Status != want {
				t.Errorf("status of the feature: got %s (%v), want %s", got.Status, got.FailureMessage, want)
			}
			if got := r.reads > 0; got != test.isBuilt {
				t.Errorf("%d reads of content and %d deliveries, want the bundle built: %t", r.reads, r.deliveries, test.isBuilt)
			}
			if !test.isBuilt && r.deliveries > 0 {
				t.Errorf("the bundle was delivered %d times", r.deliveries)
			}
		})
	}
}

// TestMissingObjectForTemplates deletes an object that templates refer to. The feature fails with the name of the
// object, and its bundle stays on the member.
func TestMissingObjectForTemplates(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	s := r.summary()
	s.Generation++
	s.Spec.ClusterProfileSpec.TemplateResourceRefs = []configv1beta1.TemplateResourceRef{
		{Identifier: "Settings", Resource: corev1.ObjectReference{Kind: "ConfigMap", Name: "settings"}},
	}
	r.must(r.hub.Update(t.Context(), s))
	before := r.deployed[resourcesID]
	got := r.reconcile()
	if want := "templateResourceRefs Settings: ConfigMap fleet/settings does not exist"; got.Status != libv1beta1.FeatureStatusFailed || got.FailureMessage != want {
		t.Errorf("got %s, %s, want %s", got.Status, got.FailureMessage, want)
	}
	if after := r.deployed[resourcesID]; r.deliveries > 0 || after.Report.Digest != before.Report.Digest || after.Removing {
		t.Errorf("%d deliveries, and the bundle is %+v, want %+v", r.deliveries, after, before)
	}
}

// TestSecretsOfTheHubMakeContentPrivate composes a bundle whose templates can read a Secret of the hub.
func TestSecretsOfTheHubMakeContentPrivate(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	composer := &Composer{Contents: &source.Contents{Hub: r.hub}, Objects: r.hub, Hub: r.hub, Manifests: render.NewManifestRenderer()}
	for _, hasSecret := range []bool{false, true} {
		tmplCtx := source.TemplateContext{Namespace: "fleet", Name: "one", Resources: source.Resources{HasSecret: hasSecret}}
		got, err := composer.Compose(t.Context(), ComposeRequest{Summary: r.summary(), TemplateContext: tmplCtx}, libv1beta1.FeatureResources)
		if err != nil || len(got.Bundle.Items) != 2 || got.Bundle.Items[0].Sensitive != hasSecret || got.Bundle.Items[0].OnlySecretsPrivate == hasSecret {
			t.Errorf("with a Secret %t: got %+v, %v", hasSecret, got.Bundle.Items, err)
		}
	}
}

// TestKilledHubWritesConfigurationAtNextStart has a hub that is killed before it writes the ClusterConfiguration of a
// changed bundle. It writes it at the next start, even if both versions were applied in the same second.
func TestKilledHubWritesConfigurationAtNextStart(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	for i, applied := range []time.Duration{0, 0, time.Minute} {
		name := fmt.Sprintf("object-%d", i)
		c := content("content", "")
		r.lastApplied = time.Unix(1e9, 0).Add(applied)
		r.update(c, func() { c.Data = content(name, "1").Data })
		r.isKilled = i > 0 // the first version is recorded
		for range 2 {      // the second reconcile reads the status that the first one has written
			r.reconcile()
		}
		r.isKilled = false
		r.reconcile()
		configuration := &configv1beta1.ClusterConfiguration{}
		r.must(r.hub.Get(t.Context(), client.ObjectKey{Namespace: "fleet", Name: "sveltos--one"}, configuration))
		listed := configuration.Status.ClusterProfileResources[0].Features[0].Resources
		if !slices.ContainsFunc(listed, func(resource configv1beta1.DeployedResource) bool { return resource.Name == name }) {
			t.Errorf("change %d: the ClusterConfiguration lists %+v, want %s", i, listed, name)
		}
		if r.reconcile(); r.deliveries > 0 {
			t.Errorf("change %d: the unchanged bundle is built again", i)
		}
	}
}
