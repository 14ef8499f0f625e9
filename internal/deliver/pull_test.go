package deliver

import (
	gocmp "cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

func mustDeliver(t *testing.T, transport Transport, m fleet.Member, b bundle.Bundle) bundle.Report {
	t.Helper()
	report, err := transport.Deliver(t.Context(), m, b)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestGroupHasTheFieldsOfSveltos(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("surface")
	b := testBundle(objects("a", "1"), objects("b", "1"))
	b.Options.ContinueOnConflict = true
	b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/spec/replicas"}, Target: &libv1beta1.PatchSelector{Kind: "Deployment"}}}
	report := mustDeliver(t, h.pull, m, b)
	if want := (bundle.Report{ID: b.ID, State: bundle.StatePending}); !cmp.Equal(want, report) {
		t.Errorf("first report: got %+v, want %+v", report, want)
	}
	group := h.getGroup(m, b.ID)
	digest, _ := b.Digest()
	spec := group.Spec
	if spec.Action != libv1beta1.ActionDeploy || spec.UpdatePhase != libv1beta1.UpdatePhaseReady || spec.SourceStatus != libv1beta1.SourceActive ||
		spec.Tier != 100 || !spec.ContinueOnConflict || !spec.ContinueOnError || !spec.DriftDetection || bundle.DigestFromBytes(spec.RequestorHash) != digest ||
		spec.SourceRef.Name != b.ID.RequestorName || spec.SourceRef.Namespace != m.Namespace {
		t.Errorf("spec: got %+v", spec)
	}
	if diff := cmp.Diff(b.Options.DriftExclusions, spec.DriftExclusions); diff != "" {
		t.Errorf("driftExclusions (-want +got):\n%s", diff)
	}
	if len(spec.ConfigurationItems) != 2 || spec.ConfigurationItems[0].ContentRef.Namespace != m.DeliveryNamespace {
		t.Errorf("items: got %+v", spec.ConfigurationItems)
	}
	if id, ok := IDOf(group); !ok || id != b.ID || group.Labels[libv1beta1.PullClusterNameLabel] != m.Name {
		t.Errorf("labels: got %v", group.Labels)
	}
}

// TestGroupNamesTheServiceAccount checks that agents that do not know the field refuse the group, and that a withdrawal
// has the field.
func TestGroupNamesTheServiceAccount(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("account")
	b := testBundle(objects("a", "1"))
	b.Options.ServiceAccount = "team/deployer"
	mustDeliver(t, h.pull, m, b)
	group := h.getGroup(m, b.ID)
	if got := group.Spec.ServiceAccountNamespace + "/" + group.Spec.ServiceAccountName; got != b.Options.ServiceAccount {
		t.Errorf("got ServiceAccount %s in the group, want %s", got, b.Options.ServiceAccount)
	}
	d, _ := newDelivery(group)
	fetched, err := NewAgentSource(clientFor(t, h.plane.Config), m.DeliveryNamespace, m.Name).Fetch(t.Context(), d)
	if err != nil || fetched.Options.ServiceAccount != b.Options.ServiceAccount {
		t.Errorf("the agent gets ServiceAccount %q, error %v", fetched.Options.ServiceAccount, err)
	}
	for _, w := range []bundle.Withdrawal{{ID: b.ID}, {ID: b.ID, ServiceAccount: "team/other"}} {
		if _, err := h.pull.Withdraw(t.Context(), m, w); err != nil {
			t.Fatal(err)
		}
		d, _ := newDelivery(h.getGroup(m, b.ID))
		if got, want := d.Withdrawal().ServiceAccount, gocmp.Or(w.ServiceAccount, b.Options.ServiceAccount); got != want {
			t.Errorf("the agent withdraws as %q, want %q", got, want)
		}
	}
}

func TestRedeliveryWritesNothing(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("again")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	h.requests.take()
	for range 3 {
		mustDeliver(t, h.pull, m, b)
	}
	// A hub reads namespaces from its cache.
	if log := h.requests.take("configuration"); len(log) != 3 {
		t.Errorf("requests before it is provisioned: got %v, want one read of the group each", log)
	}
	h.startAgent(m, newMemberEngine())
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	h.requests.take()
	mustDeliver(t, h.pull, m, b)
	h.restart()
	mustDeliver(t, h.pull, m, b)
	if log := h.requests.take("configuration"); len(log) != 2 {
		t.Errorf("requests after it is provisioned: got %v, want one read of the group each", log)
	}
}

// TestInputsAreRefreshed delivers an equal bundle with other inputs, for example after an upgrade of the hub.
func TestInputsAreRefreshed(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("inputs")
	b := testBundle(objects("a", "1"))
	b.Inputs = "one"
	mustDeliver(t, h.pull, m, b)
	before := h.getGroup(m, b.ID)
	for _, step := range []struct {
		inputs, want string
		writes       int
	}{{"one", "one", 0}, {"two", "two", 1}, {"two", "two", 0}, {"", "two", 0}} {
		b.Inputs = step.inputs
		h.requests.take()
		mustDeliver(t, h.pull, m, b)
		if got := writes(h.requests.take()); len(got) != step.writes {
			t.Errorf("inputs %q: got the writes %v, want %d", step.inputs, got, step.writes)
		}
		if found, ok, err := h.pull.FindDeployed(t.Context(), m, b.ID); err != nil || !ok || found.Inputs != step.want {
			t.Errorf("inputs %q: got %q, %t, %v, want %q", step.inputs, found.Inputs, ok, err, step.want)
		}
	}
	if diff := cmp.Diff(before.Spec, h.getGroup(m, b.ID).Spec); diff != "" || before.Generation != h.getGroup(m, b.ID).Generation {
		t.Errorf("the spec has changed (-before +after):\n%s", diff)
	}
	changed := testBundle(objects("a", "2"))
	mustDeliver(t, h.pull, m, changed)
	if found, _, err := h.pull.FindDeployed(t.Context(), m, b.ID); err != nil || found.Inputs != "" {
		t.Errorf("a bundle without inputs: got %q, %v", found.Inputs, err)
	}
}

func TestRequestsPerChange(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("cost")
	agent, _ := h.startAgent(m, newMemberEngine())
	deliverUntil(t, h.pull, m, testBundle(objects("a", "1")), bundle.StateApplied)
	h.requests.take()
	agent.take()
	deliverUntil(t, h.pull, m, testBundle(objects("a", "2")), bundle.StateApplied)
	hubWrites, agentLog := writes(h.requests.take()), agent.take()
	t.Logf("one changed object on one member costs the hub %d writes:\n%s\nand the agent %d requests:\n%s",
		len(hubWrites), strings.Join(hubWrites, "\n"), len(agentLog), strings.Join(agentLog, "\n"))
	if len(hubWrites) != 2 || len(agentLog) != 3 {
		t.Errorf("got %d writes of the hub and %d requests of the agent, want 2 (bundle, group) and 3 (bundle, and the reports of the start, as for a Helm release, and of the result)", len(hubWrites), len(agentLog))
	}
	if fields := h.getGroup(m, testBundle().ID).ManagedFields; len(fields) > 0 {
		t.Errorf("got %d managed fields of the group, want none after a change and a report", len(fields))
	}
}

func TestCrashBetweenContentAndGroup(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("crash")
	engine := newMemberEngine()
	h.startAgent(m, engine)
	old := testBundle(objects("a", "1"))
	deliverUntil(t, h.pull, m, old, bundle.StateApplied)
	h.requests.failIf(func(r *http.Request) bool {
		return strings.Contains(r.URL.Path, "configurationgroups") && r.Method != http.MethodGet
	})
	fresh := testBundle(objects("a", "2"), objects("crash-marker", "1"))
	if _, err := h.pull.Deliver(t.Context(), m, fresh); !errors.Is(err, errCrash) {
		t.Fatalf("got error %v, want %v", err, errCrash)
	}
	if found := h.listBundles(m.DeliveryNamespace, "crash-marker"); len(found) != 1 {
		t.Errorf("bundles before the group: got %v, want 1", found)
	}
	if digest, _ := old.Digest(); bundle.DigestFromBytes(h.getGroup(m, old.ID).Spec.RequestorHash) != digest {
		t.Error("the group changed before the crash")
	}
	h.requests.failIf(nil)
	h.restart()
	deliverUntil(t, h.pull, m, fresh, bundle.StateApplied)
	wantNames(t, engine, "a", "crash-marker")
}

func TestCrashBetweenTwoBundles(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("crash")
	created := 0
	h.requests.failIf(func(r *http.Request) bool {
		if strings.Contains(r.URL.Path, "configurationbundles") && r.Method == http.MethodPost {
			created++
		}
		return created == 2
	})
	b := testBundle(objects("a", "1"), objects("b", "1"))
	if _, err := h.pull.Deliver(t.Context(), m, b); !errors.Is(err, errCrash) {
		t.Fatalf("got error %v, want %v", err, errCrash)
	}
	groups := &libv1beta1.ConfigurationGroupList{}
	if err := h.admin.List(t.Context(), groups, client.InNamespace(m.DeliveryNamespace)); err != nil || len(groups.Items) != 0 {
		t.Errorf("groups: got %d and error %v, want none", len(groups.Items), err)
	}
	h.requests.failIf(nil)
	h.restart()
	engine := newMemberEngine()
	h.startAgent(m, engine)
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	wantNames(t, engine, "a", "b")
}

func TestMissingContentIsWrittenAgain(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("missing")
	b := testBundle(objects("a", "1"), objects("b", "1"))

	mustDeliver(t, h.pull, m, b)
	h.deleteBundles(m.DeliveryNamespace)
	first := newMemberEngine()
	_, stop := h.startAgent(m, first)
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	wantNames(t, first, "a", "b")
	stop()

	// Another member gets the name, long after the content was deleted on the hub.
	h.deleteBundles(m.DeliveryNamespace)
	h.restart()
	second := newMemberEngine()
	h.startAgent(m, second)
	eventually(t, "the agent reports missing content", func(context.Context) error {
		if report := ReportOf(h.getGroup(m, b.ID)); report.State != bundle.StateMissing {
			return fmt.Errorf("report is %+v", report)
		}
		return nil
	})
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	wantNames(t, second, "a", "b")
}

func TestRestartedHubWritesUnfetchedContent(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("restart")
	b := testBundle(objects("restart-marker", "1"))
	mustDeliver(t, h.pull, m, b)
	generation := h.getGroup(m, b.ID).Generation
	h.deleteBundles(m.DeliveryNamespace)
	h.restart()
	mustDeliver(t, h.pull, m, b)
	if found := h.listBundles(m.DeliveryNamespace, "restart-marker"); len(found) != 1 {
		t.Errorf("bundles: got %v, want 1", found)
	}
	if got := h.getGroup(m, b.ID).Generation; got != generation {
		t.Errorf("the group was written again: generation %d, was %d", got, generation)
	}
}

func TestSharedContentIsStoredOnce(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	secret := configMap("shared-marker-secret", "1")
	secret.SetKind("Secret")
	private := objects("shared-marker-private", "1")
	private.Sensitive = true
	b := testBundle(objects("shared-marker-public", "1"), private, bundle.Item{Objects: []*unstructured.Unstructured{secret}})
	b.SharedBy = 2
	members := []fleet.Member{h.createMember("one"), h.createMember("two")}
	for i, m := range members {
		// Each member has its own summary.
		b.ID.RequestorName = fmt.Sprintf("summary-%d", i)
		mustDeliver(t, h.pull, m, b)
	}
	if found := h.listBundles(kube.AgentNamespace, "shared-marker"); len(found) != 1 {
		t.Errorf("shared bundles: got %v, want the public one", found)
	}
	for i, m := range members {
		if found := h.listBundles(m.DeliveryNamespace, "shared-marker"); len(found) != 2 {
			t.Errorf("bundles of %s: got %v, want the two private ones", m.Name, found)
		}
		engine := newMemberEngine()
		h.startAgent(m, engine)
		b.ID.RequestorName = fmt.Sprintf("summary-%d", i)
		deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		wantNames(t, engine, "shared-marker-private", "shared-marker-public", "shared-marker-secret")
	}
	shared := &libv1beta1.ConfigurationBundle{}
	name := client.ObjectKey{Namespace: kube.AgentNamespace, Name: h.listBundles(kube.AgentNamespace, "shared-marker")[0]}
	if err := h.admin.Get(t.Context(), name, shared); err != nil {
		t.Fatal(err)
	}
	if raw := fmt.Sprint(shared.Labels, shared.Annotations); strings.Contains(raw, "one") || strings.Contains(raw, "summary-") {
		t.Errorf("the shared bundle names a member: %s", raw)
	}
}

// TestOnlySecretsArePrivate delivers an item with a Secret between other objects, like a chart with a password. All
// other content is stored once for both members.
func TestOnlySecretsArePrivate(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	secret := configMap("split-marker-secret", "1")
	secret.SetKind("Secret")
	item := bundle.Item{
		Objects:   []*unstructured.Unstructured{configMap("split-marker-a", "1"), secret, configMap("split-marker-b", "1"), configMap("split-marker-c", "1")},
		Release:   &bundle.Release{Name: "split-marker", Namespace: "site", Data: bundle.ReleaseData{Notes: "hello"}},
		Sensitive: true, OnlySecretsPrivate: true,
	}
	want := []string{"split-marker-a", "split-marker-b", "split-marker-c", "split-marker-secret"}
	b := testBundle(item)
	b.SharedBy = 2
	for _, name := range []string{"split-one", "split-two"} {
		m, engine := h.createMember(name), newMemberEngine()
		b.ID.RequestorName = name
		mustDeliver(t, h.pull, m, b)
		if found := h.listBundles(m.DeliveryNamespace, "split-marker"); len(found) != 1 {
			t.Errorf("bundles of %s: got %v, want the one with the Secret", name, found)
		}
		h.startAgent(m, engine)
		deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		wantNames(t, engine, want...)
	}
	if found := h.listBundles(kube.AgentNamespace, "split-marker"); len(found) != 2 {
		t.Errorf("shared bundles: got %v, want those before and after the Secret", found)
	}
	// If the content is from a Secret, all of it is private.
	item.OnlySecretsPrivate = false
	b = testBundle(item)
	b.SharedBy = 2
	m := h.createMember("split-private")
	mustDeliver(t, h.pull, m, b)
	if found := h.listBundles(m.DeliveryNamespace, "split-marker"); len(found) != 1 {
		t.Errorf("private content: got bundles %v, want one", found)
	}
}

func TestAgentWithInventoryFetchesOnlyNewBundles(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("reconnect")
	engine := newMemberEngine()
	_, stop := h.startAgent(m, engine)
	b := testBundle(objects("a", "1"))
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	stop()
	h.deleteBundles(m.DeliveryNamespace)
	before := engine.writeCount()
	agent, _ := h.startAgent(m, engine)
	next := testBundle(objects("b", "1"))
	next.ID.Feature = "Helm"
	deliverUntil(t, h.pull, m, next, bundle.StateApplied)
	if fetched := agent.take("configurationbundles"); len(fetched) != 1 {
		t.Errorf("fetched %v, want the new bundle only", fetched)
	}
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	if after := engine.writeCount(); after != before+1 {
		t.Errorf("%d writes, want 1", after-before)
	}
}

func TestDeletedGroupRemovesNothing(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("vanish")
	engine := newMemberEngine()
	h.startAgent(m, engine)
	b, other := testBundle(objects("a", "1")), testBundle(objects("b", "1"))
	other.ID.Feature = "Helm"
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	if err := h.admin.Delete(t.Context(), h.getGroup(m, b.ID)); err != nil {
		t.Fatal(err)
	}
	// After a later delivery, the agent has received the event of the deletion.
	deliverUntil(t, h.pull, m, other, bundle.StateApplied)
	wantNames(t, engine, "a", "b")
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	wantNames(t, engine, "a", "b")
}

func TestWithdrawalWaitsForTheAgent(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("withdraw")
	engine := newMemberEngine()
	_, stop := h.startAgent(m, engine)
	b := testBundle(objects("a", "1"))
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	stop()
	for range 2 {
		if done, err := h.pull.Withdraw(t.Context(), m, bundle.Withdrawal{ID: b.ID}); done || err != nil {
			t.Fatalf("without the agent: got %v and %v, want not done", done, err)
		}
	}
	// The profile matches again before the agent runs again: no objects are removed.
	if report := mustDeliver(t, h.pull, m, b); report.State != bundle.StatePending {
		t.Errorf("report: got %+v, want Pending", report)
	}
	before := engine.writeCount()
	h.startAgent(m, engine)
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	if after := engine.writeCount(); after != before {
		t.Errorf("%d writes, want none", after-before)
	}
	withdrawUntilDone(t, h.pull, m, bundle.Withdrawal{ID: b.ID})
	wantNames(t, engine)
}

func TestWithdrawalDoesNotTrustACache(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("stale")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	live := clientFor(t, h.plane.Config)
	stale := interceptor.NewClient(live, interceptor.Funcs{
		Get: func(context.Context, client.WithWatch, client.ObjectKey, client.Object, ...client.GetOption) error {
			return apierrors.NewNotFound(schema.GroupResource{}, "group")
		},
	})
	pull, err := NewPullTransport(stale, live, testKey)
	if err != nil {
		t.Fatal(err)
	}
	if done, err := pull.Withdraw(t.Context(), m, bundle.Withdrawal{ID: b.ID}); done || err != nil {
		t.Errorf("got %v and %v, want not done", done, err)
	}
	if got := h.getGroup(m, b.ID).Spec.Action; got != libv1beta1.ActionRemove {
		t.Errorf("action: got %s", got)
	}
}

func TestCorruptBundleIsReportedAndChangesNothing(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("corrupt")
	engine := newMemberEngine()
	_, stop := h.startAgent(m, engine)
	b := testBundle(objects("a", "1"))
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	stop()
	changed := testBundle(objects("corrupt-marker", "1"))
	mustDeliver(t, h.pull, m, changed)
	obj := &libv1beta1.ConfigurationBundle{}
	name := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: h.listBundles(m.DeliveryNamespace, "corrupt-marker")[0]}
	if err := h.admin.Get(t.Context(), name, obj); err != nil {
		t.Fatal(err)
	}
	_, others := pack(t, testBundle(objects("evil", "1")))
	obj.Spec.Payload = others[0].Spec.Payload
	if err := h.admin.Update(t.Context(), obj); err != nil {
		t.Fatal(err)
	}
	h.startAgent(m, engine)
	report := deliverUntil(t, h.pull, m, changed, bundle.StateFailed)
	if !strings.Contains(report.Message, obj.Name) || !strings.Contains(report.Message, ErrCorrupt.Error()) {
		t.Errorf("message: got %q", report.Message)
	}
	wantNames(t, engine, "a")
}

func TestKeyIsCreatedOnce(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	keys := make([]Key, 8)
	var running sync.WaitGroup
	for i := range keys {
		running.Go(func() {
			key, err := LoadOrCreateKey(t.Context(), h.admin)
			if err != nil {
				t.Error(err)
			}
			keys[i] = key
		})
	}
	running.Wait()
	for _, key := range keys {
		if len(key) != 32 || !cmp.Equal(key, keys[0]) {
			t.Errorf("keys differ: %d bytes", len(key))
		}
	}
}
