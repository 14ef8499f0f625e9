package hub_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// waitTimeout is the timeout of eventually. It is long, since many tests share the processors.
const waitTimeout = time.Minute

// routingTransport is the transport of a hub. It passes each call to the fakeTransport of the test with the member's
// namespace.
type routingTransport struct {
	mu    sync.Mutex // guards tests
	tests map[string]*fakeTransport
}

// sharedTransport is the transport of sharedHub.
var sharedTransport = &routingTransport{tests: map[string]*fakeTransport{}}

func (s *routingTransport) transportOf(m fleet.Member) *fakeTransport {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tests[m.Namespace]
}

func (s *routingTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error) {
	if transport := s.transportOf(m); transport != nil {
		return transport.deliver(ctx, m, b)
	}
	return bundle.Report{}, errors.New("no test has this namespace")
}

func (s *routingTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	if transport := s.transportOf(m); transport != nil {
		return transport.withdraw(ctx, m, w)
	}
	return true, nil
}

func (s *routingTransport) FindDeployed(_ context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	if transport := s.transportOf(m); transport != nil {
		return transport.findDeployed(m, id)
	}
	return bundle.Deployed{}, false, nil
}

func (s *routingTransport) ListDeployed(_ context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	if transport := s.transportOf(m); transport != nil {
		return transport.listDeployed(m)
	}
	return nil, nil
}

var _ deliver.Transport = (*routingTransport)(nil)

// fakeTransport is the transport of one test. Each call succeeds at once, unless the test sets answer or refuse.
type fakeTransport struct {
	mu sync.Mutex // guards the fields below
	// deployed has the deployed bundles by member and ID.
	deployed map[string]bundle.Bundle
	// withdrawn has all withdrawals.
	withdrawn []bundle.Withdrawal
	// records has the inventory record of each delivered bundle by member and ID, applied or not.
	records map[string]bundle.Deployed
	// answer changes the report of a delivery, and refuse returns the result of a withdrawal; nil means success.
	answer func(b bundle.Bundle, report *bundle.Report) error
	refuse func(w bundle.Withdrawal) (bool, error)
}

func (b *fakeTransport) deliver(_ context.Context, m fleet.Member, want bundle.Bundle) (bundle.Report, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	digest, err := want.Digest()
	if err != nil {
		return bundle.Report{}, err
	}
	report := bundle.Report{ID: want.ID, Digest: digest, State: bundle.StateApplied, LastApplied: time.Now(), Kinds: kindsOf(want)}
	if b.answer != nil {
		if err := b.answer(want, &report); err != nil {
			return report, err
		}
	}
	b.record(m, want, report)
	if report.State == bundle.StateApplied {
		b.deployed[m.Name+" "+want.ID.String()] = want
	}
	return report, nil
}

func kindsOf(b bundle.Bundle) []string {
	kinds := map[string]bool{}
	for _, ref := range b.Refs() {
		kinds[ref.Kind+"."+ref.Version+"."+ref.Group] = true
	}
	return slices.Sorted(maps.Keys(kinds))
}

func (b *fakeTransport) withdraw(_ context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refuse != nil {
		if done, err := b.refuse(w); !done || err != nil {
			return done, err
		}
	}
	b.withdrawn = append(b.withdrawn, w)
	delete(b.deployed, m.Name+" "+w.ID.String())
	delete(b.records, m.Name+" "+w.ID.String())
	return true, nil
}

// record records a delivery. The caller must hold mu.
func (b *fakeTransport) record(m fleet.Member, want bundle.Bundle, report bundle.Report) {
	if b.records == nil {
		b.records = map[string]bundle.Deployed{}
	}
	b.records[m.Name+" "+want.ID.String()] = bundle.Deployed{
		ID: want.ID, Owner: want.Owner, Hub: want.Hub, CorrectDrift: want.Options.CorrectDrift, Report: report, Releases: want.DeployedReleases(),
	}
}

func (b *fakeTransport) findDeployed(m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	found, ok := b.records[m.Name+" "+id.String()]
	return found, ok, nil
}

func (b *fakeTransport) listDeployed(m fleet.Member) ([]bundle.Deployed, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []bundle.Deployed
	for _, key := range slices.Sorted(maps.Keys(b.records)) {
		if strings.HasPrefix(key, m.Name+" ") {
			all = append(all, b.records[key])
		}
	}
	return all, nil
}

// set calls change with mu held, for example to set answer.
func (b *fakeTransport) set(change func(*fakeTransport)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(b)
}

// refs lists the objects of a feature on a member, of all profiles, as text.
func (b *fakeTransport) refs(member, feature string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var refs []string
	for _, key := range slices.Sorted(maps.Keys(b.deployed)) {
		if found := b.deployed[key]; found.ID.Feature == feature && key == member+" "+found.ID.String() {
			for _, ref := range found.Refs() {
				refs = append(refs, ref.String())
			}
		}
	}
	return refs
}

// withdrawals lists the different withdrawals. A summary that changes before its finalizer is removed is withdrawn
// again, with an equal withdrawal.
func (b *fakeTransport) withdrawals() []bundle.Withdrawal {
	b.mu.Lock()
	defer b.mu.Unlock()
	var distinct []bundle.Withdrawal
	for _, w := range b.withdrawn {
		if !slices.Contains(distinct, w) {
			distinct = append(distinct, w)
		}
	}
	return distinct
}

// startHub runs a hub on the cluster of config until the returned function is called.
func startHub(config *rest.Config, opts hub.Options) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- hub.Run(ctx, config, opts) }()
	return func() error {
		cancel()
		return <-ended
	}
}

// sharedHub starts the hub of most tests. It ends with the test binary.
var sharedHub = sync.OnceFunc(func() {
	plane, err := localkube.Start(context.Background(), localkube.Options{Name: "hub"})
	if err != nil {
		panic(err)
	}
	hubPlane = plane
	if err := hub.InstallCRDs(context.Background(), plane.Config); err != nil {
		panic(err)
	}
	startHub(plane.Config, hub.Options{Transports: map[fleet.Mode]deliver.Transport{fleet.Push: sharedTransport, fleet.Pull: sharedTransport}})
})

var hubPlane *localkube.Plane

// world is a namespace on the hub for one test, with the transport of its members.
type world struct {
	testing.TB
	*fakeTransport
	client.Client
	plane *localkube.Plane
	ns    string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	sharedHub()
	w := newWorldOn(t, hubPlane)
	sharedTransport.mu.Lock()
	defer sharedTransport.mu.Unlock()
	sharedTransport.tests[w.ns] = w.fakeTransport
	return w
}

func newWorldOn(t *testing.T, plane *localkube.Plane) *world {
	t.Helper()
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return &world{TB: t, fakeTransport: &fakeTransport{deployed: map[string]bundle.Bundle{}}, Client: hubClient, plane: plane, ns: plane.Namespace(t, "hub")}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) create(obj client.Object) {
	w.Helper()
	w.must(w.Create(w.Context(), obj))
}

// createReadyMember registers a ready pull member with a heartbeat.
func (w *world) createReadyMember(name string, labels map[string]string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := w.createMember(name, labels)
	w.renewLease(cluster, time.Now())
	w.setReady(cluster)
	return cluster
}

// renewLease renews the Lease of a pull member with a time, after the hub has created the Lease.
func (w *world) renewLease(cluster *libv1beta1.SveltosCluster, at time.Time) {
	w.Helper()
	w.eventually("heartbeat of "+cluster.Name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		lease := &coordinationv1.Lease{}
		name := client.ObjectKey{Namespace: fleet.FromSveltosCluster(cluster).DeliveryNamespace, Name: cluster.Name}
		if err := w.Get(w.Context(), name, lease); err != nil {
			return err
		}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: at}
		return w.Update(w.Context(), lease)
	})
}

func (w *world) createMember(name string, labels map[string]string) *libv1beta1.SveltosCluster {
	w.Helper()
	cluster := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name, Labels: labels},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(cluster)
	return cluster
}

func (w *world) setReady(cluster *libv1beta1.SveltosCluster) {
	w.Helper()
	before := cluster.DeepCopy()
	cluster.Status.Ready, cluster.Status.Version = true, "v1.34.0"
	w.must(w.Status().Patch(w.Context(), cluster, client.MergeFrom(before)))
}

// createConfigMap creates a ConfigMap with the key "content".
func (w *world) createConfigMap(name, content string) *corev1.ConfigMap {
	w.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Data: map[string]string{"content": content}}
	w.create(cm)
	return cm
}

// manifest returns a ConfigMap as YAML.
func manifest(name string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: %s\n  namespace: default\n", name)
}

// createProfile creates a ClusterProfile on the members of the test with the label env=prod that deploys the ConfigMap
// "manifests".
func (w *world) createProfile(change func(*configv1beta1.ProfileSpec)) *configv1beta1.ClusterProfile {
	w.Helper()
	profile := &configv1beta1.ClusterProfile{
		ObjectMeta: metav1.ObjectMeta{GenerateName: w.ns + "-"},
		Spec: configv1beta1.ProfileSpec{
			ClusterSelector: metav1.LabelSelector{MatchLabels: map[string]string{"env": "prod", "test": w.ns}},
			PolicyRefs:      []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "manifests"}},
		},
	}
	if change != nil {
		change(&profile.Spec)
	}
	w.create(profile)
	w.Cleanup(func() {
		if err := w.Delete(context.WithoutCancel(w.Context()), profile); client.IgnoreNotFound(err) != nil {
			w.Error(err)
		}
	})
	return profile
}

func (w *world) prodLabels() map[string]string { return map[string]string{"env": "prod", "test": w.ns} }

// update reads obj, changes and writes it, and retries on errors.
func update[T client.Object](w *world, obj T, change func(T)) {
	w.Helper()
	w.eventually("update "+obj.GetName(), func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		change(obj)
		return w.Update(w.Context(), obj)
	})
}

// eventually waits until check returns nil.
func (w *world) eventually(what string, check func() error) {
	w.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.Context(), 20*time.Millisecond, waitTimeout, true, func(context.Context) (bool, error) {
		last = check()
		return last == nil, nil
	})
	if err != nil {
		w.Fatalf("%s: %v", what, last)
	}
}

// getSummary returns the summary of profile on member, by its labels.
func (w *world) getSummary(profile client.Object, member string) (*configv1beta1.ClusterSummary, error) {
	var list configv1beta1.ClusterSummaryList
	label := configv1beta1.ClusterProfileNameLabel
	if profile.GetNamespace() != "" {
		label = configv1beta1.ProfileNameLabel
	}
	err := w.List(w.Context(), &list, client.InNamespace(w.ns), client.MatchingLabels{label: profile.GetName(), libv1beta1.ClusterNameLabel: member})
	if err != nil {
		return nil, err
	}
	if len(list.Items) != 1 {
		return nil, fmt.Errorf("%d summaries of %s on %s", len(list.Items), profile.GetName(), member)
	}
	return &list.Items[0], nil
}

// wantFeature waits until the feature of profile on member has the status and the message, and returns the summary.
func (w *world) wantFeature(profile client.Object, member string, want configv1beta1.FeatureSummary) *configv1beta1.ClusterSummary {
	w.Helper()
	var got *configv1beta1.ClusterSummary
	w.eventually(fmt.Sprintf("%s on %s", want.FeatureID, member), func() error {
		summary, err := w.getSummary(profile, member)
		if err != nil {
			return err
		}
		got = summary
		for _, feature := range summary.Status.FeatureSummaries {
			if feature.FeatureID == want.FeatureID && feature.Status == want.Status && feature.FailureMessage == want.FailureMessage {
				return nil
			}
		}
		return fmt.Errorf("features are %+v, want %s %q", summary.Status.FeatureSummaries, want.Status, want.FailureMessage)
	})
	return got
}

func (w *world) wantProvisioned(profile client.Object, member string) *configv1beta1.ClusterSummary {
	w.Helper()
	return w.wantFeature(profile, member, configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioned})
}

// wantNoSummary waits until there is no summary of profile on member.
func (w *world) wantNoSummary(profile client.Object, member string) {
	w.Helper()
	w.eventually("deletion of the summary on "+member, func() error {
		if summary, err := w.getSummary(profile, member); err == nil {
			return fmt.Errorf("the summary exists: %+v", summary.Status)
		}
		return nil
	})
}

// listEvents lists the events about obj as "Type Reason Note", sorted.
func (w *world) listEvents(obj client.Object) []string {
	w.Helper()
	var list eventsv1.EventList
	w.must(w.List(w.Context(), &list))
	var all []string
	for _, event := range list.Items {
		if event.Regarding.UID == obj.GetUID() {
			all = append(all, event.Type+" "+event.Reason+" "+event.Note)
		}
	}
	slices.Sort(all)
	return all
}

func memberNamed(name string) fleet.Member { return fleet.Member{Type: fleet.TypeSveltos, Name: name} }
