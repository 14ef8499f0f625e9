package session_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
)

// steps records the steps of a delivery to a member, and is the Source and the Engine of the Worker.
type steps struct {
	session.Source
	session.Engine
	outdated []bundle.OutdatedRelease
	startErr error
	// failure is the report of the last run, if that failed. err is the error of a run.
	failure *bundle.Report
	err     error
	// fetchErr is the error of Fetch.
	fetchErr error
	// release is nil for a bundle without a Helm release. duration is the time that it takes to apply the bundle.
	release  *bundle.Release
	duration time.Duration
	cached   bundle.Digest
	// removed is true if no object of a withdrawal is left.
	removed bool

	mu  sync.Mutex
	all []string
}

func (s *steps) record(step string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, step)
}

func (s *steps) Fetch(context.Context, deliver.Delivery) (bundle.Bundle, error) {
	if s.fetchErr != nil {
		return bundle.Bundle{}, s.fetchErr
	}
	return bundle.Bundle{Items: []bundle.Item{{Release: s.release}}}, nil
}

func (s *steps) Report(_ context.Context, _ deliver.Delivery, report bundle.Report) error {
	text := "report " + string(report.State)
	if len(report.Outdated) > 0 {
		text += ", outdated"
	}
	s.record(text)
	return nil
}

func (s *steps) ReportStart(context.Context, deliver.Delivery) error {
	s.record("report the start")
	return s.startErr
}

func (s *steps) CachedDigest(bundle.ID) (bundle.Digest, bool) {
	return s.cached, s.cached != bundle.Digest{}
}

func (s *steps) RecordedDigest(context.Context, bundle.ID) (bundle.Digest, bundle.State, bool, error) {
	if s.cached != (bundle.Digest{}) {
		s.record("read the inventory")
	}
	return s.cached, bundle.StateApplied, s.cached != bundle.Digest{}, nil
}

func (s *steps) FindDeployed(context.Context, bundle.ID) (bundle.Deployed, bool, error) {
	return bundle.Deployed{Report: bundle.Report{State: bundle.StateApplied, Digest: s.cached}}, true, nil
}

func (s *steps) Failure(bundle.ID, bundle.Digest) (bundle.Report, bool) {
	if s.failure == nil {
		return bundle.Report{}, false
	}
	return *s.failure, true
}

func (s *steps) CompareRenderings(context.Context, bundle.Bundle) (bundle.Report, error) {
	s.record("compare")
	if len(s.outdated) > 0 {
		return bundle.Report{State: bundle.StateApplying, Outdated: s.outdated}, nil
	}
	return bundle.Report{}, nil
}

func (s *steps) Converge(context.Context, bundle.Bundle) (bundle.Report, error) {
	s.record("converge")
	<-time.After(s.duration)
	if s.err != nil {
		return bundle.Report{State: bundle.StateFailed}, s.err
	}
	return bundle.Report{State: bundle.StateApplied}, nil
}

func (s *steps) Withdraw(context.Context, bundle.Withdrawal) (done bool, err error) {
	s.record("withdraw")
	return s.removed, nil
}

func (s *steps) Wake(bundle.ID) { s.record("wake") }

// TestStartIsReportedAfterTheComparison delivers a bundle. The hub gets the report that revisions may have begun after
// the comparison with the release records, and before the first one begins.
func TestStartIsReportedAfterTheComparison(t *testing.T) {
	t.Parallel()
	errHub := errors.New("the hub is away")
	release := &bundle.Release{Name: "web"}
	for name, tc := range map[string]struct {
		member  *steps
		want    []string
		wantErr error
	}{
		"the right rendering":      {member: &steps{release: release}, want: []string{"compare", "report the start", "converge", "report Applied"}},
		"an outdated rendering":    {member: &steps{release: release, outdated: []bundle.OutdatedRelease{{Name: "web", Revision: 2}}}, want: []string{"compare", "report Applying, outdated"}},
		"the hub is away":          {member: &steps{release: release, startErr: errHub}, want: []string{"compare", "report the start"}, wantErr: errHub},
		"the request was replaced": {member: &steps{release: release, startErr: deliver.ErrReplaced}, want: []string{"compare", "report the start"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := tc.member.handle(t); !errors.Is(err, tc.wantErr) {
				t.Errorf("got error %v, want %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(tc.want, tc.member.all); diff != "" {
				t.Errorf("the steps differ (-want +got):\n%s", diff)
			}
		})
	}
}

// handle lets a worker handle one delivery.
func (s *steps) handle(t *testing.T) error {
	t.Helper()
	worker := &session.Worker{Source: s, Engine: s, Gate: session.NewGate(false), OnKindsChanged: func() {}, OnConverged: func(error) {}}
	return worker.Handle(t.Context(), deliver.Delivery{})
}

// TestChangeReadsTheInventoryOnce delivers bundles to a member with an inventory. Converge reads the inventory, so a
// change must not read it before.
func TestChangeReadsTheInventoryOnce(t *testing.T) {
	t.Parallel()
	older, newer := bundle.Digest{1}, bundle.Digest{2}
	for name, tc := range map[string]struct {
		delivery deliver.Delivery
		want     []string
	}{
		"a change":                   {deliver.Delivery{Digest: newer, Reported: bundle.Report{State: bundle.StateApplied, Digest: older}}, []string{"compare", "converge", "report Applied"}},
		"a lost report":              {deliver.Delivery{Digest: older}, []string{"read the inventory", "report Applied"}},
		"a reported, unknown bundle": {deliver.Delivery{Digest: newer, Reported: bundle.Report{State: bundle.StateApplied, Digest: newer}}, []string{"read the inventory", "compare", "converge", "report Applied"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			member := &steps{cached: older}
			worker := &session.Worker{Source: member, Engine: member, Gate: session.NewGate(false), OnKindsChanged: func() {}, OnConverged: func(error) {}}
			if err := worker.Handle(t.Context(), tc.delivery); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, member.all); diff != "" {
				t.Errorf("the steps differ (-want +got):\n%s", diff)
			}
		})
	}
}

// TestStartOfContentIsReportedWhenItTakesLong delivers bundles without Helm releases. Nothing depends on the report of
// their start, so it is sent only if applying takes more than two seconds.
func TestStartOfContentIsReportedWhenItTakesLong(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		member *steps
		want   []string
	}{
		"at once":                         {member: &steps{}, want: []string{"compare", "converge", "report Applied"}},
		"after long":                      {member: &steps{duration: 3 * time.Second}, want: []string{"compare", "converge", "report the start", "report Applied"}},
		"after long, and the hub is away": {member: &steps{duration: 3 * time.Second, startErr: errors.New("away")}, want: []string{"compare", "converge", "report the start", "report Applied"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if err := tc.member.handle(t); err != nil {
					t.Error(err)
				}
				if diff := cmp.Diff(tc.want, tc.member.all); diff != "" {
					t.Errorf("the steps differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// TestOneLoopRetries delivers bundles that fail. The caller retries a delivery only if the Engine does not.
func TestOneLoopRetries(t *testing.T) {
	t.Parallel()
	errRun := errors.New("it failed")
	for name, tc := range map[string]struct {
		member  *steps
		want    []string
		wantErr error
	}{
		"the caller must retry":     {member: &steps{err: errRun}, want: []string{"compare", "converge", "report Failed"}, wantErr: errRun},
		"the engine retries":        {member: &steps{err: &bundle.TerminalError{Err: errRun}}, want: []string{"compare", "converge", "report Failed"}},
		"it has failed before":      {member: &steps{failure: &bundle.Report{State: bundle.StateFailed}, fetchErr: errRun}, want: []string{"report Failed"}},
		"an option is not known":    {member: &steps{fetchErr: deliver.ErrUnsupported}, want: []string{"report Failed"}},
		"the content is corrupt":    {member: &steps{fetchErr: deliver.ErrCorrupt}, want: []string{"report Failed"}},
		"the hub does not respond":  {member: &steps{fetchErr: errRun}, wantErr: errRun},
		"the content is not stored": {member: &steps{fetchErr: deliver.ErrContentMissing}, want: []string{"report Missing"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := tc.member.handle(t); !errors.Is(err, tc.wantErr) {
				t.Errorf("got error %v, want %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(tc.want, tc.member.all); diff != "" {
				t.Errorf("the steps differ (-want +got):\n%s", diff)
			}
		})
	}
}

// listedHub is a hub whose watches do not list the objects first: the fake client cannot do that.
type listedHub struct{ client.WithWatch }

// IsWatchListSemanticsUnSupported is a method that reflectors look for.
func (listedHub) IsWatchListSemanticsUnSupported() bool { return true }

// deliveryOf returns the delivery of a group with this action.
func deliveryOf(t *testing.T, action libv1beta1.Action) (d deliver.Delivery) {
	t.Helper()
	group := &libv1beta1.ConfigurationGroup{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "fleet", Name: "group",
			Labels: map[string]string{
				libv1beta1.PullClusterNameLabel: "edge", libv1beta1.PullRequestorKindLabel: "ClusterSummary", libv1beta1.PullRequestorFeatureLabel: "Resources",
			},
			Annotations: map[string]string{libv1beta1.PullRequestorNameAnnotation: "web"},
		},
		Spec: libv1beta1.ConfigurationGroupSpec{Action: action},
	}
	scheme := runtime.NewScheme()
	if err := libv1beta1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	hub := listedHub{fake.NewClientBuilder().WithScheme(scheme).WithObjects(group).Build()}
	ctx, stop := context.WithCancel(t.Context())
	err := deliver.NewAgentSource(hub, group.Namespace, "edge").Run(ctx, 1, func(_ context.Context, delivery deliver.Delivery) error {
		d = delivery
		stop()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestWithdrawalIsLeftToTheEngine handles a withdrawal whose objects still exist, and waits for an hour. The Engine
// checks the objects, and wakes the delivery when they no longer exist.
func TestWithdrawalIsLeftToTheEngine(t *testing.T) {
	t.Parallel()
	d := deliveryOf(t, libv1beta1.ActionRemove)
	synctest.Test(t, func(t *testing.T) {
		member := &steps{}
		worker := &session.Worker{Source: member, Engine: member, Gate: session.NewGate(false), OnKindsChanged: func() {}, OnWithdrawn: func() {}}
		for _, removed := range []bool{false, true} {
			member.removed = removed
			if err := worker.Handle(t.Context(), d); err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Hour)
		}
		want := []string{"withdraw", "report Removing", "withdraw", "report Removed"}
		if diff := cmp.Diff(want, member.all); diff != "" {
			t.Errorf("the steps differ (-want +got):\n%s", diff)
		}
	})
}

// TestCorruptContentIsFetchedOncePerInterval handles a delivery of corrupt content several times in 5 minutes.
func TestCorruptContentIsFetchedOncePerInterval(t *testing.T) {
	t.Parallel()
	d := deliveryOf(t, libv1beta1.ActionDeploy)
	synctest.Test(t, func(t *testing.T) {
		member := &steps{fetchErr: deliver.ErrCorrupt}
		worker := &session.Worker{Source: member, Engine: member, Gate: session.NewGate(false)}
		var want []string
		for range 2 {
			for range 3 {
				if err := worker.Handle(t.Context(), d); err != nil {
					t.Fatal(err)
				}
				want = append(want, "report Failed")
			}
			<-time.After(10 * time.Minute)
			want = append(want, "wake")
		}
		if diff := cmp.Diff(want, member.all); diff != "" {
			t.Errorf("the steps differ (-want +got):\n%s", diff)
		}
	})
}
