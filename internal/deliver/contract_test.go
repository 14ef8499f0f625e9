package deliver

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// fixture is one member, a transport to it, and the engine of the member.
type fixture struct {
	transport Transport
	member    fleet.Member
	engine    *memberEngine
}

// transports returns a fixture for each Transport. The tests below run with each of them.
var transports = map[string]func(t *testing.T) fixture{
	"push": pushFixture,
	"pull": pullFixture,
	"by mode": func(t *testing.T) fixture {
		f := pullFixture(t)
		f.transport = ByMode{fleet.Pull: f.transport, fleet.Push: &PushTransport{}}
		return f
	},
}

func pushFixture(*testing.T) fixture {
	engine := newMemberEngine()
	direct := &PushTransport{Engines: func(context.Context, fleet.Member) (Engine, error) { return engine, nil }}
	return fixture{transport: direct, engine: engine, member: fleet.Member{Namespace: "eu", Name: "eu-1", Mode: fleet.Push}}
}

func pullFixture(t *testing.T) fixture {
	h := sharedHub(t)
	f := fixture{transport: h.pull, engine: newMemberEngine(), member: h.createMember("pull")}
	h.startAgent(f.member, f.engine)
	return f
}

func forEveryTransport(t *testing.T, test func(t *testing.T, f fixture)) {
	t.Helper()
	t.Parallel()
	for name, newFixture := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newFixture(t))
		})
	}
}

func objects(namesAndValues ...string) bundle.Item {
	var item bundle.Item
	for i := 0; i < len(namesAndValues); i += 2 {
		item.Objects = append(item.Objects, configMap(namesAndValues[i], namesAndValues[i+1]))
	}
	return item
}

func wantNames(t *testing.T, engine *memberEngine, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, engine.listNames()); diff != "" {
		t.Errorf("objects on the member (-want +got):\n%s", diff)
	}
}

func TestTransportDeliversChangesAndWithdraws(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		first := testBundle(objects("a", "1", "b", "1"), objects("c", "1"))
		report := deliverUntil(t, f.transport, f.member, first, bundle.StateApplied)
		if report.ID != first.ID || len(report.Kinds) != 1 || report.LastApplied.IsZero() {
			t.Errorf("report: %+v", report)
		}
		got, _ := f.engine.record(first.ID)
		if diff := cmp.Diff(first, got); diff != "" {
			t.Errorf("bundle on the member (-want +got):\n%s", diff)
		}
		second := testBundle(objects("a", "2", "d", "1"))
		second.Options.ContinueOnError = true
		deliverUntil(t, f.transport, f.member, second, bundle.StateApplied)
		wantNames(t, f.engine, "a", "d")
		withdrawUntilDone(t, f.transport, f.member, bundle.Withdrawal{ID: second.ID})
		wantNames(t, f.engine)
		withdrawUntilDone(t, f.transport, f.member, bundle.Withdrawal{ID: second.ID})
		deliverUntil(t, f.transport, f.member, first, bundle.StateApplied)
		wantNames(t, f.engine, "a", "b", "c")
	})
}

func TestTransportDeliversAnUnchangedBundleOnce(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		b := testBundle(objects("a", "1", "b", "1"))
		deliverUntil(t, f.transport, f.member, b, bundle.StateApplied)
		before := f.engine.writeCount()
		for range 5 {
			deliverUntil(t, f.transport, f.member, b, bundle.StateApplied)
		}
		if after := f.engine.writeCount(); after != before {
			t.Errorf("an unchanged bundle caused %d writes, want none", after-before)
		}
	})
}

func TestTransportReportsAFailureUntilItIsFixed(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		b := testBundle(objects("a", "1", "b", "1"))
		f.engine.refuseObject("b", "no room")
		report := deliverUntil(t, f.transport, f.member, b, bundle.StateFailed)
		if !strings.Contains(report.Message, "ConfigMap default/b: no room") {
			t.Errorf("message: got %q", report.Message)
		}
		f.engine.refuseObject("b", "")
		report = deliverUntil(t, f.transport, f.member, b, bundle.StateApplied)
		if report.Message != "" {
			t.Errorf("message: got %q, want none", report.Message)
		}
	})
}

func TestTransportWithdrawsAnUnknownBundle(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		deliverUntil(t, f.transport, f.member, testBundle(objects("a", "1")), bundle.StateApplied)
		withdrawUntilDone(t, f.transport, f.member, bundle.Withdrawal{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "x", Feature: "Helm"}})
		wantNames(t, f.engine, "a")
	})
}

func TestTransportListsDeployedBundles(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		b := testBundle(objects("a", "1"))
		b.Hub, b.Owner.Kind, b.Owner.Name = "hub-uid", "ClusterProfile", "web"
		deliverUntil(t, f.transport, f.member, b, bundle.StateApplied)
		digest, err := b.Digest()
		if err != nil {
			t.Fatal(err)
		}
		found, ok, err := f.transport.FindDeployed(t.Context(), f.member, b.ID)
		if err != nil || !ok || found.Report.State != bundle.StateApplied || found.Report.Digest != digest || found.Hub != "hub-uid" || found.Owner.Name != "web" {
			t.Errorf("FindDeployed() = %+v, %t, %v", found, ok, err)
		}
		all, err := f.transport.ListDeployed(t.Context(), f.member)
		if err != nil || len(all) != 1 || all[0].ID != b.ID || all[0].Removing {
			t.Errorf("ListDeployed() = %+v, %v", all, err)
		}
		withdrawUntilDone(t, f.transport, f.member, bundle.Withdrawal{ID: b.ID})
		if all, err := f.transport.ListDeployed(t.Context(), f.member); err != nil || len(all) > 0 {
			t.Errorf("ListDeployed() after the withdrawal = %+v, %v", all, err)
		}
		if _, ok, err := f.transport.FindDeployed(t.Context(), f.member, b.ID); ok || err != nil {
			t.Errorf("FindDeployed() after the withdrawal = %t, %v", ok, err)
		}
	})
}

func TestTransportWithdrawsWithOrphan(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		b := testBundle(objects("a", "1"))
		deliverUntil(t, f.transport, f.member, b, bundle.StateApplied)
		withdrawUntilDone(t, f.transport, f.member, bundle.Withdrawal{ID: b.ID, Orphan: true})
		wantNames(t, f.engine, "a")
		if _, ok := f.engine.record(b.ID); ok {
			t.Error("the member still has a record")
		}
	})
}

func TestTransportDeliversLargeAndEmptyBundles(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		big := testBundle(objects("a", randomText(1400<<10), "b", randomText(2<<20)), bundle.Item{}, objects("c", randomText(1<<20)))
		deliverUntil(t, f.transport, f.member, big, bundle.StateApplied)
		wantNames(t, f.engine, "a", "b", "c")
		deliverUntil(t, f.transport, f.member, testBundle(), bundle.StateApplied)
		wantNames(t, f.engine)
	})
}

func TestTransportKeepsTheBundleIfTheNextCannotBeEncoded(t *testing.T) {
	forEveryTransport(t, func(t *testing.T, f fixture) {
		good := testBundle(objects("a", "1"))
		deliverUntil(t, f.transport, f.member, good, bundle.StateApplied)
		broken := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "X", "c": make(chan int)}}
		if _, err := f.transport.Deliver(t.Context(), f.member, testBundle(bundle.Item{Objects: []*unstructured.Unstructured{broken}})); err == nil {
			t.Error("got no error")
		}
		wantNames(t, f.engine, "a")
		deliverUntil(t, f.transport, f.member, good, bundle.StateApplied)
	})
}

func TestPushTransportNamesAnUnreachableMember(t *testing.T) {
	t.Parallel()
	down := errors.New("connection refused")
	direct := &PushTransport{Engines: func(context.Context, fleet.Member) (Engine, error) { return nil, down }}
	m := fleet.Member{Namespace: "eu", Name: "eu-1"}
	if _, err := direct.Deliver(t.Context(), m, testBundle()); !errors.Is(err, down) || !strings.Contains(err.Error(), "eu/eu-1") {
		t.Errorf("deliver: got %v", err)
	}
	if done, err := direct.Withdraw(t.Context(), m, bundle.Withdrawal{}); done || !errors.Is(err, down) {
		t.Errorf("withdraw: got %v and %v", done, err)
	}
	if _, err := (ByMode{}).Deliver(t.Context(), m, testBundle()); err == nil {
		t.Error("deliver without a transport: got no error")
	}
}
