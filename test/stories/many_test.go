package stories

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// crowdSize pull members share crowdPlanes control planes. Members on one control plane get different objects, since
	// they would be in conflict over the same ones. So each member of a control plane is in another group; all members of
	// a group get the same objects.
	crowdSize   = 20
	crowdPlanes = 4
	// crowdObjects is the number of objects of each member.
	crowdObjects = 10
)

// TestMany deploys one profile to 20 pull members at once and logs the time and the cost.
func TestMany(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.planes(crowdPlanes)
	for i := range crowdSize {
		w.runCrowdMember(planes[i%crowdPlanes], crowdName(i), crowdGroup(i))
		if i%crowdPlanes == 0 {
			w.apply(w.hub, crowdContent(crowdGroup(i)))
		}
	}
	for i := range crowdSize {
		w.awaitReady(crowdName(i), crowdName(i))
	}

	seen := w.watchRollout()
	before := w.requests(w.hub)
	began := time.Now()
	w.apply(w.hub, `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: crowd}
spec:
  clusterSelector: {matchLabels: {env: crowd}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: "{{ .Cluster.metadata.labels.group }}"}
`)
	times := seen.awaitProvisioned(began)
	seen.awaitNoBundles()
	cost := w.requests(w.hub).Since(before)
	for i := range crowdSize {
		if err := w.wantCount(planes[i%crowdPlanes], crowdGroup(i), crowdObjects); err != nil {
			t.Error(err)
		}
	}
	t.Logf("one profile, %d objects, on %d pull members\n%s", crowdObjects, crowdSize, table(
		[]string{"from apply to Provisioned, p50", quantile(times, 50).String()},
		[]string{"from apply to Provisioned, p99", quantile(times, 99).String()},
		[]string{"from apply to Provisioned, max", times[len(times)-1].String()},
		[]string{"hub requests per member", perMember(cost.Total())},
		[]string{"hub bytes per member, during (bundles)", perMember(seen.bundleBytes())},
		[]string{"hub bytes per member, after (group, summary, configuration)", perMember(w.hubBytes())},
		[]string{"member bytes per member (record)", perMember(w.recordBytes(planes))},
	))
	t.Logf("hub requests in all, by kind\n%s", cost)
}

func crowdName(i int) string { return fmt.Sprintf("crowd-%02d", i) }

func crowdGroup(i int) string { return fmt.Sprintf("group-%d", i/crowdPlanes) }

// crowdContent is the ConfigMap with the content for the members of a group, in a namespace with the name of the group.
func crowdContent(group string) string {
	var objects strings.Builder
	for i := range crowdObjects {
		fmt.Fprintf(&objects, "    ---\n    apiVersion: v1\n    kind: ConfigMap\n    metadata: {namespace: %s, name: cm-%d}\n    data: {text: %q}\n",
			group, i, noise(uint64(i), 400))
	}
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s}\ndata:\n  objects.yaml: |\n%s", group, objects.String())
}

// planes starts n control planes at the same time.
func (w *world) planes(n int) []*localkube.Plane {
	w.t.Helper()
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("plane-%d", i)
	}
	return localkube.SeveralForTest(w.t, names)
}

// runCrowdMember registers a pull member with this name, in a namespace with this name, and runs its agent in this
// process until the story ends.
func (w *world) runCrowdMember(plane *localkube.Plane, name, group string) {
	w.t.Helper()
	var manifest bytes.Buffer
	request := join.PullRequest{Request: join.Request{Namespace: name, Name: name, Labels: map[string]string{"env": "crowd", "group": group}}}
	if err := join.RegisterPull(w.t.Context(), w.hub.Config, request, &manifest); err != nil {
		w.t.Fatal(err)
	}
	w.applyCredentials(plane, manifest.String())
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx, agent.Options{Member: plane.Config, Namespace: name, Name: name}) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			w.t.Errorf("agent of %s: %v", name, err)
		}
	})
}

// applyCredentials applies the namespace and the Secret of a manifest, without the agent's Deployment.
func (w *world) applyCredentials(plane *localkube.Plane, manifest string) {
	w.t.Helper()
	member := w.client(plane)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}
	if err := client.IgnoreAlreadyExists(member.Create(w.t.Context(), namespace)); err != nil {
		w.t.Fatal(err)
	}
	for document := range strings.SplitSeq(manifest, "---\n") {
		if !strings.Contains(document, "kind: Secret\n") {
			continue
		}
		var secret corev1.Secret
		if err := yaml.UnmarshalStrict([]byte(document), &secret); err != nil {
			w.t.Fatal(err)
		}
		if err := member.Create(w.t.Context(), &secret); err != nil {
			w.t.Fatal(err)
		}
	}
}

// rolloutWatch watches the summaries and bundles of a rollout.
type rolloutWatch struct {
	w *world

	// mu guards the fields below; changed is closed and replaced with every event.
	mu sync.Mutex
	// done has the time at which the summary with this name was first provisioned.
	done map[string]time.Time
	// current are the bundles on the hub, and bundles has the sizes of all bundles since the start.
	current map[client.ObjectKey]struct{}
	bundles map[client.ObjectKey]int
	changed chan struct{}
}

func (w *world) watchRollout() *rolloutWatch {
	w.t.Helper()
	c := &rolloutWatch{
		w: w, done: map[string]time.Time{}, current: map[client.ObjectKey]struct{}{}, bundles: map[client.ObjectKey]int{},
		changed: make(chan struct{}),
	}
	c.follow(&configv1beta1.ClusterSummaryList{}, c.noteSummary)
	c.follow(&libv1beta1.ConfigurationBundleList{}, c.noteBundle)
	return c
}

func (c *rolloutWatch) follow(list client.ObjectList, note func(watch.Event)) {
	c.w.t.Helper()
	watcher, err := client.NewWithWatch(c.w.hub.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		c.w.t.Fatal(err)
	}
	events, err := watcher.Watch(c.w.t.Context(), list)
	if err != nil {
		c.w.t.Fatal(err)
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		for event := range events.ResultChan() {
			note(event)
		}
	})
	c.w.t.Cleanup(func() {
		events.Stop()
		reader.Wait()
	})
}

func (c *rolloutWatch) noteSummary(event watch.Event) {
	summary, ok := event.Object.(*configv1beta1.ClusterSummary)
	if !ok || len(summary.Status.FeatureSummaries) == 0 {
		return
	}
	for _, feature := range summary.Status.FeatureSummaries {
		if feature.Status != libv1beta1.FeatureStatusProvisioned {
			return
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.done[summary.Name]; known {
		return
	}
	c.done[summary.Name] = time.Now()
	c.notify()
}

func (c *rolloutWatch) noteBundle(event watch.Event) {
	bundle, ok := event.Object.(*libv1beta1.ConfigurationBundle)
	if !ok {
		return
	}
	key := client.ObjectKeyFromObject(bundle)
	c.mu.Lock()
	defer c.mu.Unlock()
	if event.Type == watch.Deleted {
		delete(c.current, key)
	} else {
		c.current[key] = struct{}{}
		c.bundles[key] = sizeOf(c.w, bundle)
	}
	c.notify()
}

// notify wakes the goroutines that wait. The caller holds mu.
func (c *rolloutWatch) notify() {
	close(c.changed)
	c.changed = make(chan struct{})
}

// awaitProvisioned waits until all members are provisioned, and returns their sorted times.
func (c *rolloutWatch) awaitProvisioned(began time.Time) []time.Duration {
	c.w.t.Helper()
	deadline := time.After(waitTimeout)
	for {
		times, changed := c.times(began)
		if len(times) == crowdSize {
			slices.Sort(times)
			return times
		}
		select {
		case <-changed:
		case <-deadline:
			c.w.t.Fatalf("%d of %d members are provisioned within %s:\n%s", len(times), crowdSize, waitTimeout,
				c.w.kubectl(c.w.hub, "get", "clustersummaries", "-A", "-o", "wide"))
		}
	}
}

// awaitNoBundles waits until no bundle is left on the hub. It sends no requests, since these are counted.
func (c *rolloutWatch) awaitNoBundles() {
	c.w.t.Helper()
	deadline := time.After(waitTimeout)
	for {
		c.mu.Lock()
		left, changed := len(c.current), c.changed
		c.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			c.w.t.Fatalf("%d bundles are left on the hub after %s", left, waitTimeout)
		}
	}
}

func (c *rolloutWatch) times(began time.Time) ([]time.Duration, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var times []time.Duration
	for _, at := range c.done {
		times = append(times, at.Sub(began).Round(time.Millisecond))
	}
	return times, c.changed
}

// bundleBytes returns the total size of all bundles since the start.
func (c *rolloutWatch) bundleBytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	total := 0
	for _, size := range c.bundles {
		total += size
	}
	return total
}

// hubBytes returns the size of the hub's objects for the profile.
func (w *world) hubBytes() int {
	w.t.Helper()
	total := 0
	for _, list := range []client.ObjectList{&libv1beta1.ConfigurationGroupList{}, &configv1beta1.ClusterSummaryList{}, &configv1beta1.ClusterConfigurationList{}} {
		if err := w.client(w.hub).List(w.t.Context(), list); err != nil {
			w.t.Fatal(err)
		}
		total += sizeOf(w, list)
	}
	return total
}

// recordBytes returns the size of the agents' records on their members.
func (w *world) recordBytes(planes []*localkube.Plane) int {
	w.t.Helper()
	total := 0
	for _, plane := range planes {
		var secrets corev1.SecretList
		if err := w.client(plane).List(w.t.Context(), &secrets, client.InNamespace(kube.AgentNamespace)); err != nil {
			w.t.Fatal(err)
		}
		for _, secret := range secrets.Items {
			if strings.HasPrefix(secret.Name, "towline-") {
				total += sizeOf(w, &secret)
			}
		}
	}
	return total
}

// sizeOf returns the length of an object as JSON. Custom resources are stored as JSON.
func sizeOf(w *world, object any) int {
	raw, err := json.Marshal(object)
	if err != nil {
		w.t.Error(err)
	}
	return len(raw)
}

// requests returns the requests to the API server of a plane for Towline's kinds and events.
func (w *world) requests(plane *localkube.Plane) localkube.RequestCounts {
	w.t.Helper()
	return w.requestsFor(plane, func(r localkube.Request) bool {
		return strings.HasSuffix(r.Group, ".projectsveltos.io") || r.Resource == "events"
	})
}

// requestsFor returns the selected requests to the API server of a plane.
func (w *world) requestsFor(plane *localkube.Plane, selected func(localkube.Request) bool) localkube.RequestCounts {
	w.t.Helper()
	counts, err := plane.CountRequests(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return counts.Select(selected)
}

func perMember(total int) string { return fmt.Sprintf("%.1f", float64(total)/crowdSize) }

// quantile returns the nearest-rank percentile of sorted times.
func quantile(sorted []time.Duration, percent int) time.Duration {
	return sorted[(len(sorted)*percent+99)/100-1]
}

func table(rows ...[]string) string {
	var out strings.Builder // its writes return no error
	writer := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		_, _ = fmt.Fprintln(writer, "  "+strings.Join(row, "\t"))
	}
	_ = writer.Flush()
	return out.String()
}
