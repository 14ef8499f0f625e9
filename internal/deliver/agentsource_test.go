package deliver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// TestAgentSourceRetriesWhileTheHubIsDown restarts the API server of the hub. An API server has no events of the time
// before its start: it responds to a watch from an earlier version with 410 Expired, "too old resource version". So the
// agent reads all its groups again, but only once.
func TestAgentSourceRetriesWhileTheHubIsDown(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t)
	h := newHub(t, plane)
	m := h.createMember("outage")
	engine := newMemberEngine()
	log, _ := h.startAgent(m, engine)
	deliverUntil(t, h.pull, m, testBundle(objects("a", "1")), bundle.StateApplied)
	log.takeSucceeded()
	if err := plane.Kill(); err != nil {
		t.Fatal(err)
	}
	wantNames(t, engine, "a")
	if err := plane.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	deliverUntil(t, h.pull, m, testBundle(objects("b", "1")), bundle.StateApplied)
	wantNames(t, engine, "b")
	if lists, _ := readsOfGroups(t, log.takeSucceeded()); len(lists) > 1 {
		t.Errorf("the agent has read all its groups %d times after the restart, want once: %q", len(lists), lists)
	}
}

// TestAgentSourceContinuesItsWatch closes the connections between an agent and an API server. The agent continues its
// watch without another list.
func TestAgentSourceContinuesItsWatch(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m, engine, network := h.createMember("continues"), newMemberEngine(), &hubNetwork{}
	config := rest.CopyConfig(h.plane.Config)
	config.Dial = network.dial
	log, _ := h.startAgentOn(config, m, engine)
	deliverUntil(t, h.pull, m, testBundle(objects("a", "1")), bundle.StateApplied)
	// A reflector lists again after a short watch without events. Another delivery causes an event.
	deliverUntil(t, h.pull, m, testBundle(objects("b", "1")), bundle.StateApplied)
	if lists, _ := readsOfGroups(t, log.take()); len(lists) == 0 {
		t.Error("the agent has not listed its groups before the outage")
	}
	network.setDown(true)
	mustDeliver(t, h.pull, m, testBundle(objects("c", "1")))
	eventually(t, "the agent retries", func(context.Context) error { return network.wasUsedWhileDown() })
	network.setDown(false)
	deliverUntil(t, h.pull, m, testBundle(objects("c", "1")), bundle.StateApplied)
	wantNames(t, engine, "c")
	if lists, watches := readsOfGroups(t, log.take()); len(lists) > 0 || len(watches) == 0 {
		t.Errorf("after the outage: lists %q and watches %q, want only watches", lists, watches)
	}
}

// hubNetwork has the connections of a client to the hub, and can close and refuse them.
type hubNetwork struct {
	mu          sync.Mutex // guards the fields below
	isDown      bool
	connections []net.Conn
	refused     int // connections while isDown
}

// dial opens a connection.
func (n *hubNetwork) dial(ctx context.Context, protocol, address string) (net.Conn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.isDown {
		n.refused++
		return nil, &net.OpError{Op: "dial", Net: protocol, Err: errors.New("the network is down")}
	}
	connection, err := (&net.Dialer{}).DialContext(ctx, protocol, address)
	if err == nil {
		n.connections = append(n.connections, connection)
	}
	return connection, err
}

// setDown closes all connections and refuses new connections if isDown is true.
func (n *hubNetwork) setDown(isDown bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isDown = isDown
	for _, connection := range n.connections {
		_ = connection.Close() // the client may have closed it
	}
	n.connections = nil
}

// wasUsedWhileDown returns an error if the client has not tried to connect while the network was down.
func (n *hubNetwork) wasUsedWhileDown() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refused == 0 {
		return errors.New("no connection was refused")
	}
	return nil
}

// readsOfGroups returns the queries in log that list all groups of a member, and the queries of watches that continue
// from a version. It omits the lists with limit 1 of kube.DetectRestore.
func readsOfGroups(t *testing.T, log []string) (lists, watches []string) {
	t.Helper()
	for _, line := range log {
		uri, isGet := strings.CutPrefix(line, "GET ")
		if !isGet {
			continue
		}
		request, err := url.Parse(uri)
		if err != nil {
			t.Fatal(err)
		}
		if path.Base(request.Path) != "configurationgroups" {
			continue
		}
		switch query := request.Query(); {
		case query.Get("limit") == "1":
		case query.Has("watch") && query.Get("resourceVersion") != "" && !query.Has("sendInitialEvents"):
			watches = append(watches, request.RawQuery)
		default: // a watch with sendInitialEvents begins with all groups
			lists = append(lists, request.RawQuery)
		}
	}
	return lists, watches
}

func TestAgentSourceFindsAndWakes(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("find")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	agentSource := NewAgentSource(clientFor(t, h.plane.Config), m.DeliveryNamespace, m.Name)
	handled := make(chan Delivery, 10)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- agentSource.Run(ctx, 1, func(_ context.Context, d Delivery) error { handled <- d; return nil })
	}()
	first := <-handled
	digest, _ := b.Digest()
	if first.ID != b.ID || first.Digest != digest || first.Remove || first.Reported.State != bundle.StatePending {
		t.Errorf("delivery: got %+v", first)
	}
	eventually(t, "the agentSource is synced", func(context.Context) error {
		if _, ok := agentSource.Find(b.ID); !ok || !agentSource.Synced() {
			return errors.New("not yet")
		}
		return nil
	})
	agentSource.Wake(b.ID)
	<-handled

	// The Delivery has an older version of the group, from before all reports.
	for _, state := range []bundle.State{bundle.StateApplied, bundle.StateFailed, bundle.StateApplied, bundle.StateApplied} {
		if err := agentSource.Report(t.Context(), first, bundle.Report{ID: b.ID, Digest: digest, State: state, Message: "m"}); err != nil {
			t.Fatal(err)
		}
		if got := ReportOf(h.getGroup(m, b.ID)); got.State != state || got.Message != "m" {
			t.Errorf("report: got %+v, want state %s and the message", got, state)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if len(handled) > 0 {
		t.Error("the agentSource handles its own reports")
	}
}

func TestLostReportIsWrittenAgain(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m, engine := h.createMember("lost-report"), newMemberEngine()
	h.startAgent(m, engine)
	b := testBundle(objects("a", "1"))
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	writes := engine.writeCount()
	for name, patch := range map[string]string{
		"cleared": `{"status":null}`, "nonsense": `{"status":{"deploymentStatus":"FailedNonRetriable","failureMessage":"no","observedRequestorHash":null}}`,
	} {
		group := h.getGroup(m, b.ID)
		if err := h.admin.Status().Patch(t.Context(), group, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" status is reported again", func(context.Context) error {
			if report := ReportOf(h.getGroup(m, b.ID)); report.State != bundle.StateApplied {
				return fmt.Errorf("the report is %+v", report)
			}
			return nil
		})
	}
	if got := engine.writeCount(); got != writes {
		t.Errorf("a lost report caused %d writes on the member, want none", got-writes)
	}
}

func TestUnrequestedBundlesAreListed(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m, engine := h.createMember("unrequested"), newMemberEngine()
	agentSource := NewAgentSource(clientFor(t, h.plane.Config), m.DeliveryNamespace, m.Name)
	deployed := []bundle.Deployed{
		{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "left", Feature: "Helm"}, Owner: bundle.Owner{Kind: "Profile", Name: "eu/left"}, Hub: "uid", Removing: true},
	}
	if _, known := agentSource.Unrequested(deployed); known {
		t.Error("Unrequested() before a connection to the hub: got true, want false")
	}
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, m, b)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- agentSource.Run(ctx, 1, func(ctx context.Context, d Delivery) error { return handleDelivery(ctx, agentSource, engine, d) })
	}()
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
	held, err := engine.ListDeployed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	value, known := agentSource.Unrequested(append(held, deployed...))
	if !known || value == "" {
		t.Fatalf("Unrequested() = %q, %t", value, known)
	}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: m.Name, Annotations: map[string]string{kube.AnnotationUnrequested: value}}}
	if err := h.admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	all, err := h.pull.ListDeployed(t.Context(), m)
	if err != nil || len(all) != 2 || !all[0].Requested {
		t.Fatalf("ListDeployed() = %+v, %v", all, err)
	}
	if diff := cmp.Diff(deployed[0], all[1]); diff != "" {
		t.Errorf("the unrequested bundle (-want +got):\n%s", diff)
	}
	if value, known := agentSource.Unrequested(held); !known || value != "" {
		t.Errorf("Unrequested() without unrequested bundles = %q, %t", value, known)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAgentSourceReadsOnlyBundlesForItsMember(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m, other := h.createMember("mine"), h.createMember("other")
	b := testBundle(objects("a", "1"))
	mustDeliver(t, h.pull, other, b)
	group := h.getGroup(other, b.ID)
	agentSource := NewAgentSource(clientFor(t, h.plane.Config), m.DeliveryNamespace, m.Name)
	d, _ := newDelivery(group)
	if _, err := agentSource.Fetch(t.Context(), d); !errors.Is(err, ErrCorrupt) {
		t.Errorf("got error %v, want %v", err, ErrCorrupt)
	}
	group.Spec.ConfigurationItems[0].ContentRef.Namespace = kube.AgentNamespace
	if _, err := agentSource.Fetch(t.Context(), d); !errors.Is(err, ErrContentMissing) {
		t.Errorf("got error %v, want %v", err, ErrContentMissing)
	}
	group.Spec.PreDeployChecks = []libv1beta1.ValidateHealth{{}}
	if _, err := agentSource.Fetch(t.Context(), d); !errors.Is(err, ErrUnsupported) {
		t.Errorf("got error %v, want %v", err, ErrUnsupported)
	}
}

// TestReportFailsIfItIsNotStored reports to a hub whose CustomResourceDefinition does not have Towline's own fields.
func TestReportFailsIfItIsNotStored(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle())
	for name, isPruned := range map[string]bool{"stored": false, "pruned": true} {
		hub := fake.NewClientBuilder().WithScheme(kube.Scheme()).WithStatusSubresource(group).WithObjects(group.DeepCopy()).WithInterceptorFuncs(interceptor.Funcs{
			SubResourcePatch: func(ctx context.Context, c client.Client, name string, obj client.Object, patch client.Patch, opts ...client.SubResourcePatchOption) error {
				group, ok := obj.(*libv1beta1.ConfigurationGroup)
				if !ok {
					return fmt.Errorf("unexpected type %T", obj)
				}
				if isPruned {
					group.Status.OutdatedReleases, group.Status.ContentMissing = nil, false
				}
				return c.SubResource(name).Patch(ctx, group, patch, opts...)
			},
		}).Build()
		stored := &libv1beta1.ConfigurationGroup{}
		if err := hub.Get(t.Context(), client.ObjectKeyFromObject(group), stored); err != nil {
			t.Fatal(err)
		}
		d, ok := newDelivery(stored)
		if !ok {
			t.Fatal("the group has no delivery")
		}
		report := bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying, Outdated: []bundle.OutdatedRelease{{Namespace: "a", Name: "adopted", Revision: 3}}}
		err := NewAgentSource(hub, group.Namespace, "eu-1").Report(t.Context(), d, report)
		if (err != nil) != isPruned {
			t.Errorf("%s: got error %v", name, err)
		}
		// A later report of the same delivery has no outdated releases.
		report.State, report.Outdated = bundle.StateApplied, nil
		if err := NewAgentSource(hub, group.Namespace, "eu-1").Report(t.Context(), d, report); err != nil {
			t.Errorf("%s: the report of an applied bundle: %v", name, err)
		}
		if err := NewAgentSource(hub, group.Namespace, "eu-1").Report(t.Context(), d, d.MissingReport("")); (err != nil) != isPruned {
			t.Errorf("%s: the report of missing content: got error %v", name, err)
		}
	}
}
