package chaos

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// The flags of the test.
var (
	seed   = flag.Uint64("seed", 1, "seed of the plans of all rounds")
	rounds = flag.Int("rounds", 3, "number of rounds")
)

// TestChaos runs rounds of faults and changes. A failure names the seed and the round; the two flags repeat the same
// plan.
func TestChaos(t *testing.T) {
	f := newFleet(t, "push-1", "push-2", "pull-1", "pull-2", "pull-3")
	m := newModel()
	for _, p := range m.profiles {
		f.applyProfile(p)
	}
	f.applyChart(m)
	for i, member := range f.members {
		m.env[member.name] = environments()[i%len(environments())]
		f.register(member, m.env[member.name])
	}
	f.createForeignOnHub()
	f.awaitModel(m)
	for number := range *rounds {
		began := time.Now()
		r := &round{fleet: f, model: m, random: rand.New(rand.NewPCG(*seed, uint64(number))), end: map[*link]func(){}} //nolint:gosec // a plan is no secret
		t.Logf("seed %d, round %d", *seed, number)
		r.restoreFleet()
		r.makeFaultsAndChanges()
		r.endFaults()
		faults := time.Since(began)
		f.awaitModel(m)
		t.Logf("seed %d, round %d: settled %.1f s after %.1f s of faults", *seed, number, (time.Since(began) - faults).Seconds(), faults.Seconds())
	}
}

// round is one round of changes and faults.
type round struct {
	*fleet
	model  *model
	random *rand.Rand
	// end has a function for each link with a fault, which ends the fault.
	end     map[*link]func()
	hasLeft bool
}

// restoreFleet creates the profiles and registers the members that were deleted in the last round.
func (r *round) restoreFleet() {
	r.t.Helper()
	for _, p := range r.model.profiles {
		if p.isAbsent {
			p.isAbsent = false
			r.applyProfile(p)
		}
	}
	for _, m := range r.members {
		if _, isRegistered := r.model.env[m.name]; !isRegistered {
			env := pick(r.random, environments())
			r.t.Logf("register %s with env=%s", m.name, env)
			r.register(m, env)
			r.model.env[m.name] = env
		}
	}
}

// makeFaultsAndChanges makes faults and changes in random order, with pauses of up to two seconds.
func (r *round) makeFaultsAndChanges() {
	r.t.Helper()
	faults := []func(){r.killHub, r.killAgent, r.killAgent, r.killServer, r.toggleLinkFault, r.toggleLinkFault, r.toggleLinkFault}
	changes := []func(){r.changeContent, r.changeContent, r.changeSelector, r.relabel, r.relabel, r.upgradeChart, r.causeDrift, r.causeDrift, r.deregister, r.deleteProfile}
	for range 8 + r.random.IntN(6) {
		pick(r.random, faults)()
		pick(r.random, changes)()
		pause := time.Duration(r.random.Int64N(int64(2 * time.Second)))
		select {
		case <-time.After(pause):
		case <-r.t.Context().Done():
		}
	}
}

// endFaults ends all faults.
func (r *round) endFaults() {
	r.t.Helper()
	for _, end := range r.end {
		end()
	}
	r.background.Wait()
}

func pick[T any](random *rand.Rand, from []T) T { return from[random.IntN(len(from))] }

func (r *round) killHub() {
	r.t.Log("kill the hub")
	r.hub.kill()
}

func (r *round) killAgent() {
	m := pick(r.random, r.members[2:])
	r.t.Logf("kill the agent of %s", m.name)
	if m.agent != nil {
		m.agent.kill()
	}
}

// killServer kills an API server, and starts it again after up to five seconds.
func (r *round) killServer() {
	planes := []*localkube.Plane{r.plane}
	for _, m := range r.members {
		planes = append(planes, m.plane)
	}
	plane, pause := pick(r.random, planes), time.Duration(r.random.Int64N(int64(5*time.Second)))
	r.t.Logf("kill the API server of %s for %s", plane.Name, pause)
	r.background.Wait() // one at a time: each start takes a processor for seconds
	if err := plane.Kill(); err != nil {
		r.t.Fatal(err)
	}
	r.background.Go(func() {
		select {
		case <-time.After(pause):
		case <-r.t.Context().Done():
		}
		if err := plane.Restart(r.t.Context()); err != nil {
			r.t.Errorf("restart the API server of %s: %v", plane.Name, err)
		}
	})
}

// toggleLinkFault begins a fault of a random link, or ends the current one.
func (r *round) toggleLinkFault() {
	links := []*link{r.hubLink}
	for _, m := range r.members {
		links = append(links, m.link)
	}
	l := pick(r.random, links)
	if end, isDisturbed := r.end[l]; isDisturbed {
		r.t.Logf("the link of %s is open again", l.name)
		end()
		delete(r.end, l)
		return
	}
	state := pick(r.random, []linkState{linkCut, linkStalled, linkSlow, "half-open"})
	r.t.Logf("the link of %s is %s", l.name, state)
	if state == "half-open" {
		l.loseConnections()
		return
	}
	l.set(state)
	r.end[l] = func() { l.set(linkOpen) }
}

func (r *round) changeContent() {
	p := pick(r.random, r.model.profiles)
	p.edition++
	r.t.Logf("profile %s has edition %d", p.name, p.edition)
	r.applyProfile(p)
}

func (r *round) changeSelector() {
	p := pick(r.random, r.model.profiles)
	p.selects = pick(r.random, environments())
	r.t.Logf("profile %s selects env=%s", p.name, p.selects)
	r.applyProfile(p)
}

// deleteProfile deletes a profile until the next round.
func (r *round) deleteProfile() {
	p := pick(r.random, r.model.profiles)
	p.isAbsent = true
	r.t.Logf("profile %s is deleted", p.name)
	r.applyProfile(p)
}

func (r *round) upgradeChart() {
	r.model.chart++
	r.t.Logf("the chart has edition %d", r.model.chart)
	r.applyChart(r.model)
}

func (r *round) relabel() {
	m, env := pick(r.random, r.members), pick(r.random, environments())
	if _, isRegistered := r.model.env[m.name]; !isRegistered {
		return
	}
	r.t.Logf("%s has env=%s", m.name, env)
	r.retry("relabel "+m.name, func() error {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: clusters, Name: m.name}}
		patch := fmt.Sprintf(`{"metadata":{"labels":{"env":%q}}}`, env)
		return r.admin.Patch(r.t.Context(), cluster, client.RawPatch("application/merge-patch+json", []byte(patch)))
	})
	r.model.env[m.name] = env
}

// deregister deregisters one member, at most once per round.
func (r *round) deregister() {
	m := pick(r.random, r.members)
	if r.hasLeft {
		return
	}
	r.hasLeft = true
	r.t.Logf("%s is deregistered", m.name)
	r.retry("deregister "+m.name, func() error {
		return client.IgnoreNotFound(r.admin.Delete(r.t.Context(), &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: clusters, Name: m.name}}))
	})
	delete(r.model.env, m.name)
	m.hasLeft = true
}

// causeDrift changes or deletes an object that a profile or the chart has deployed.
func (r *round) causeDrift() {
	m, isDeletion := pick(r.random, r.members), r.random.IntN(2) == 0
	key := client.ObjectKey{Namespace: contentNamespace, Name: pick(r.random, r.model.profiles).name + "-kept"}
	if r.random.IntN(4) == 0 {
		key = client.ObjectKey{Namespace: chartProfile, Name: chartObject}
	}
	r.t.Logf("%s of %s is deleted (or changed): %t", key.Name, m.name, isDeletion)
	err := r.changeObject(m, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}, isDeletion)
	if err != nil && !apierrors.IsNotFound(err) {
		r.t.Logf("no drift: %v", err) // its API server is down
	}
}

func (r *round) changeObject(m *member, object *corev1.ConfigMap, isDeletion bool) error {
	if isDeletion {
		return m.admin.Delete(r.t.Context(), object)
	}
	key := "text" // a key that no profile has would belong to another client, and would stay
	if object.Name == chartObject {
		key = "edition"
	}
	return m.admin.Patch(r.t.Context(), object, client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"data":{%q:"by hand"}}`, key)))
}

// applyProfile applies a profile and its ConfigMap, or deletes the profile.
func (f *fleet) applyProfile(p *profile) {
	f.t.Helper()
	if p.isAbsent {
		f.retry("delete profile "+p.name, func() error {
			return client.IgnoreNotFound(f.admin.Delete(f.t.Context(), &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: p.name}}))
		})
		return
	}
	var content strings.Builder
	objects := p.objects()
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		text := objects[name]
		fmt.Fprintf(&content, "    ---\n    apiVersion: v1\n    kind: ConfigMap\n    metadata: {namespace: %s, name: %s}\n    data: {text: %q}\n", contentNamespace, name, text)
	}
	f.apply("profile "+p.name, fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s}
data:
  objects.yaml: |
%[2]s
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  syncMode: ContinuousWithDriftDetection
  clusterSelector: {matchLabels: {env: %[3]s}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: %[1]s}]
`, p.name, content.String(), p.selects))
}

// applyChart applies the profile with the chart.
func (f *fleet) applyChart(m *model) {
	f.t.Helper()
	f.apply("the profile with the chart", fmt.Sprintf(`
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  syncMode: ContinuousWithDriftDetection
  clusterSelector: {matchLabels: {charted: "yes"}}
  helmCharts:
  - {repositoryURL: %[2]q, repositoryName: chaos, chartName: chaos/%[1]s, chartVersion: 0.1.0, releaseName: %[1]s, releaseNamespace: %[1]s, values: "edition: \"%[3]d\""}
`, chartProfile, f.charts, m.chart))
}

// apply applies a manifest on the hub until that succeeds.
func (f *fleet) apply(what, manifest string) {
	f.t.Helper()
	objects, err := kube.DecodeManifest([]byte(manifest))
	if err != nil {
		f.t.Fatal(err)
	}
	for _, object := range objects {
		f.retry("apply "+what, func() error {
			applied := client.ApplyConfigurationFromUnstructured(object.DeepCopy())
			return f.admin.Apply(f.t.Context(), applied, client.FieldOwner("chaos"), client.ForceOwnership)
		})
	}
}
