package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub/summaries"
	"github.com/towline/towline/internal/localkube"
)

const (
	// The labels by which the profiles of the scenarios select clusters.
	allLabel, tenthLabel, matrixLabel, fillLabel = "scale/all", "scale/tenth", "scale/matrix", "scale/fill"
)

// options are the flags of the command.
type options struct {
	clusters, objects int
	// profiles is the number of profiles in the scenarios new, change and tenth.
	profiles int
	// matrixProfiles profiles are created at once for matrixClusters clusters.
	matrixProfiles, matrixClusters int
	// fillProfiles is the number of profiles on all clusters in the scenario summaries.
	fillProfiles int
	// namespace of all clusters, "" for a namespace for each.
	namespace string
	// private puts the content into Secrets, so that each cluster has a copy of its own.
	private   bool
	scenarios []string
	// heapProfile is a file for a heap profile of the hub after the last scenario, "" for none.
	heapProfile string
	// outage is the time without an API server in the scenario reconnect. idle is the time for which a hub that has
	// nothing to do is measured.
	outage, idle, timeout time.Duration
}

// run is one run of all scenarios.
type run struct {
	options
	hub   *testHub
	fleet *simulatedFleet
	// revision makes each version of the content differ.
	revision int
	// storedBefore is what etcd stores without clusters.
	storedBefore sizes
}

// scenario measures one thing. It appends rows to the result.
type scenario struct {
	name  string
	title string
	run   func(ctx context.Context, r *run, result *result) error
}

// allScenarios returns the scenarios in the order in which they run: later ones need the clusters of the first.
func allScenarios() []scenario {
	return []scenario{
		{"register", "clusters registered by SveltosCluster objects", register},
		{"new", "new profiles on all clusters", newProfile},
		{"change", "content changes on all clusters", changeAll},
		{"tenth", "content changes on a tenth of the clusters", changeTenth},
		{"matrix", "many new profiles on some clusters", matrix},
		{"failing", "a profile that fails on all clusters", failing},
		{"idle", "idle", idle},
		{"restart", "the hub is killed, a change waits, the hub starts", restart},
		{"reconnect", "the API server is killed and starts", reconnect},
		{"hanging", "a content change while 5 % push clusters never answer", hanging},
		{"summaries", "the hub is killed, many profiles are written to etcd, a change waits, the hub starts", manySummaries},
	}
}

func register(ctx context.Context, r *run, result *result) error {
	names := make([]string, r.clusters)
	for i := range names {
		names[i] = fmt.Sprintf("c%05d", i)
	}
	began := time.Now()
	labels := func(i int) map[string]string {
		all := map[string]string{allLabel: "true", fillLabel: "true"}
		if i%10 == 0 {
			all[tenthLabel] = "true"
		}
		if i < r.matrixClusters {
			all[matrixLabel] = "true"
		}
		return all
	}
	if err := r.fleet.register(ctx, names, r.namespace, labels); err != nil {
		return err
	}
	delays, err := r.fleet.await(ctx, "clusters are ready", r.clusters, began, func() []time.Time {
		var times []time.Time
		for name, at := range r.fleet.ready {
			if name != "mgmt" {
				times = append(times, at)
			}
		}
		return times
	})
	result.addDelays("ready", delays)
	return err
}

// writeContent creates or updates the content with the given name, and returns the time before the write.
func (r *run) writeContent(ctx context.Context, name string) (time.Time, error) {
	r.revision++
	var text strings.Builder
	for i := range r.objects {
		fmt.Fprintf(&text, "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s-%d}\ndata: {revision: \"%d\", text: %q}\n",
			name, i, r.revision, strings.Repeat("x", 200))
	}
	meta := metav1.ObjectMeta{Namespace: "default", Name: name}
	data := map[string]string{"objects.yaml": text.String()}
	var obj client.Object = &corev1.ConfigMap{ObjectMeta: meta, Data: data}
	if r.private {
		obj = &corev1.Secret{ObjectMeta: meta, StringData: data, Type: libv1beta1.ProfileSecretType}
	}
	began := time.Now()
	err := r.hub.client.Create(ctx, obj)
	if err != nil {
		obj.SetResourceVersion("")
		err = r.hub.client.Update(ctx, obj)
	}
	return began, err
}

// createProfile creates a ClusterProfile with the content of that name for the clusters with label.
func (r *run) createProfile(ctx context.Context, name, label string) error {
	kind := "ConfigMap"
	if r.private {
		kind = "Secret"
	}
	profile := &configv1beta1.ClusterProfile{}
	text := fmt.Sprintf(`
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {%[2]s: "true"}}
  policyRefs:
  - {kind: %[3]s, namespace: default, name: %[1]s}
`, name, label, kind)
	if err := yaml.UnmarshalStrict([]byte(text), profile); err != nil {
		return err
	}
	r.hub.entries += r.objects
	return r.hub.client.Create(ctx, profile)
}

// awaitRollout waits until want bundles have arrived after began, and until their summaries are Provisioned.
func (r *run) awaitRollout(ctx context.Context, result *result, want int, began time.Time) error {
	arrived, err := r.fleet.await(ctx, "at the agents", want, began, observedAfter(r.fleet.arrived, began))
	result.addDelays("at the agents", arrived)
	if err != nil {
		return err
	}
	provisioned, err := r.fleet.await(ctx, "provisioned", want, began, observedAfter(r.fleet.provisioned, began))
	result.addDelays("provisioned", provisioned)
	return err
}

// profileNames returns names of profiles and their contents.
func profileNames(prefix string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", prefix, i)
	}
	return names
}

// sharedNames returns the names of the profiles on all clusters that the scenario new creates.
func (r *run) sharedNames() []string { return profileNames("shared", r.profiles) }

// rollOut creates the profiles and their contents, and waits for them.
func (r *run) rollOut(ctx context.Context, result *result, names []string, label string, clusters int) error {
	for _, name := range names {
		if _, err := r.writeContent(ctx, name); err != nil {
			return err
		}
	}
	began := time.Now()
	for _, name := range names {
		if err := r.createProfile(ctx, name, label); err != nil {
			return err
		}
	}
	return r.awaitRollout(ctx, result, len(names)*clusters, began)
}

// changeContents changes the contents with those names, which that many clusters have, and waits for the changes.
func (r *run) changeContents(ctx context.Context, result *result, names []string, clusters int) error {
	began := time.Now()
	for _, name := range names {
		if _, err := r.writeContent(ctx, name); err != nil {
			return err
		}
	}
	return r.awaitRollout(ctx, result, len(names)*clusters, began)
}

func newProfile(ctx context.Context, r *run, result *result) error {
	return r.rollOut(ctx, result, r.sharedNames(), allLabel, r.clusters)
}

func changeAll(ctx context.Context, r *run, result *result) error {
	return r.changeContents(ctx, result, r.sharedNames(), r.clusters)
}

func changeTenth(ctx context.Context, r *run, result *result) error {
	names, clusters := profileNames("tenth", r.profiles), (r.clusters+9)/10
	if err := r.rollOut(ctx, nil, names, tenthLabel, clusters); err != nil {
		return err
	}
	if err := r.hub.awaitQuiet(ctx); err != nil {
		return err
	}
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	return r.changeContents(ctx, result, names, clusters)
}

func matrix(ctx context.Context, r *run, result *result) error {
	return r.rollOut(ctx, result, profileNames("matrix", r.matrixProfiles), matrixLabel, min(r.matrixClusters, r.clusters))
}

// failing measures the requests of a profile that all members refuse, after the first idle time.
func failing(ctx context.Context, r *run, result *result) error {
	content := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "failing"}, Data: map[string]string{
		"objects.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: " + refusedName + "}\n",
	}}
	if err := r.hub.client.Create(ctx, content); err != nil {
		return err
	}
	// The content of this profile is always a ConfigMap.
	private := r.private
	r.private = false
	err := r.createProfile(ctx, "failing", allLabel)
	r.private = private
	if err != nil {
		return err
	}
	sleep(ctx, r.idle)
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	sleep(ctx, r.idle)
	if err := result.finish(ctx, r.hub, r.clusters); err != nil {
		return err
	}
	return r.hub.client.Delete(ctx, &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: "failing"}})
}

func idle(ctx context.Context, r *run, result *result) error {
	if err := r.hub.awaitQuiet(ctx); err != nil {
		return err
	}
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	sleep(ctx, r.idle)
	return ctx.Err()
}

// restart kills the hub, changes the content and starts the hub.
func restart(ctx context.Context, r *run, result *result) error {
	r.hub.kill()
	return r.startWithChange(ctx, result, r.sharedNames()[0])
}

// startWithChange changes the content with that name, which all clusters have, and starts the hub. The use of resources
// counts from the start, the delays from the change.
func (r *run) startWithChange(ctx context.Context, result *result, content string) error {
	changed, err := r.writeContent(ctx, content)
	if err != nil {
		return err
	}
	if err := r.hub.startProcess(); err != nil {
		return err
	}
	began := time.Now()
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	if err := r.awaitRollout(ctx, result, r.clusters, changed); err != nil {
		return err
	}
	if err := r.hub.awaitQuiet(ctx); err != nil {
		return err
	}
	result.add("quiet after", (time.Since(began) - r.hub.quietWindow()).Seconds(), "s")
	return nil
}

// reconnect kills the API server, starts it after the outage, and measures a change that is made then. An agent is
// connected when it has sent a heartbeat and its watches have started.
func reconnect(ctx context.Context, r *run, result *result) error {
	if err := r.hub.plane.Kill(); err != nil {
		return err
	}
	r.fleet.forgetContacts()
	sleep(ctx, r.outage)
	if err := r.hub.plane.Restart(ctx); err != nil {
		return err
	}
	began := time.Now()
	// The counters of the API server begin again with its process.
	if err := result.beginMeasuring(ctx, r.hub); err != nil {
		return err
	}
	if err := r.changeContents(ctx, result, r.sharedNames()[:1], r.clusters); err != nil {
		return err
	}
	connected, err := r.fleet.await(ctx, "connected", r.clusters, began, r.fleet.connected)
	result.addDelays("connected", connected)
	return err
}

// quietWindow returns the time without writes after which a hub counts as quiet.
func (h *testHub) quietWindow() time.Duration {
	return summaries.ConfigurationInterval(h.entries) + time.Second
}

// awaitQuiet waits until there was no write of Towline for quietWindow.
func (h *testHub) awaitQuiet(ctx context.Context) error {
	before, err := h.plane.CountRequests(ctx)
	for err == nil {
		sleep(ctx, h.quietWindow())
		var after localkube.RequestCounts
		if after, err = h.plane.CountRequests(ctx); err != nil {
			return err
		}
		if after.Since(before).Select(isWriteOfTowline).Total() == 0 {
			return nil
		}
		before = after
	}
	return err
}

// isWriteOfTowline returns whether a request changes objects and is neither a heartbeat nor a write of endpoints by the
// control plane.
func isWriteOfTowline(r localkube.Request) bool {
	return r.IsWrite() && !isHeartbeat(r) && !strings.Contains(r.Resource, "endpoint")
}

// sleep waits for a time that is part of a measurement.
func sleep(ctx context.Context, duration time.Duration) {
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
}
