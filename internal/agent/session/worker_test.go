package session_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
)

// steps records the steps of a delivery to a member, and is the Source and the Engine of the Worker.
type steps struct {
	session.Source
	session.Engine
	all      []string
	outdated []bundle.OutdatedRelease
	startErr error
}

func (s *steps) Fetch(context.Context, deliver.Delivery) (bundle.Bundle, error) {
	return bundle.Bundle{}, nil
}

func (s *steps) Report(_ context.Context, _ deliver.Delivery, report bundle.Report) error {
	text := "report " + string(report.State)
	if len(report.Outdated) > 0 {
		text += ", outdated"
	}
	s.all = append(s.all, text)
	return nil
}

func (s *steps) ReportStart(context.Context, deliver.Delivery) error {
	s.all = append(s.all, "report the start")
	return s.startErr
}

func (s *steps) Have(context.Context, bundle.ID) (bundle.Digest, bundle.State, bool, error) {
	return bundle.Digest{}, "", false, nil
}

func (s *steps) CompareRenderings(context.Context, bundle.Bundle) (bundle.Report, error) {
	s.all = append(s.all, "compare")
	if len(s.outdated) > 0 {
		return bundle.Report{State: bundle.StateApplying, Outdated: s.outdated}, nil
	}
	return bundle.Report{}, nil
}

func (s *steps) Converge(context.Context, bundle.Bundle) (bundle.Report, error) {
	s.all = append(s.all, "converge")
	return bundle.Report{State: bundle.StateApplied}, nil
}

// TestStartIsReportedAfterTheComparison delivers a bundle. The hub gets the report that revisions may have begun after
// the comparison with the release records, and before the first one begins.
func TestStartIsReportedAfterTheComparison(t *testing.T) {
	t.Parallel()
	errHub := errors.New("the hub is away")
	for name, tc := range map[string]struct {
		member  *steps
		want    []string
		wantErr error
	}{
		"the right rendering":      {member: &steps{}, want: []string{"compare", "report the start", "converge", "report Applied"}},
		"an outdated rendering":    {member: &steps{outdated: []bundle.OutdatedRelease{{Name: "web", Revision: 2}}}, want: []string{"compare", "report Applying, outdated"}},
		"the hub is away":          {member: &steps{startErr: errHub}, want: []string{"compare", "report the start"}, wantErr: errHub},
		"the request was replaced": {member: &steps{startErr: deliver.ErrReplaced}, want: []string{"compare", "report the start"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			worker := &session.Worker{Source: tc.member, Engine: tc.member, Gate: session.NewGate(false), OnKindsChanged: func() {}, OnConverged: func(error) {}}
			if err := worker.Handle(t.Context(), deliver.Delivery{}); !errors.Is(err, tc.wantErr) {
				t.Errorf("got error %v, want %v", err, tc.wantErr)
			}
			if diff := cmp.Diff(tc.want, tc.member.all); diff != "" {
				t.Errorf("the steps differ (-want +got):\n%s", diff)
			}
		})
	}
}
