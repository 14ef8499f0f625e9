package summaries

import (
	"errors"
	"testing"
	"time"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// TestUnverifiedChartIsVerifiedAgain compares errors of a chart. No watch reports a new signature in a repository.
// After other errors that only the user can correct, a watch event triggers the reconcile.
func TestUnverifiedChartIsVerifiedAgain(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want time.Duration
	}{
		"not verified":  {phase.TerminalErrorf("chart hello: %w", source.ErrUnverified), unverifiedInterval},
		"invalid":       {phase.TerminalError{Err: errors.New("no such field")}, 0},
		"not reachable": {errors.New("connection refused"), 0},
	} {
		s := &state{summary: &configv1beta1.ClusterSummary{}}
		s.addFailedResult(libv1beta1.FeatureHelm, withReason("SourceFailed", test.err))
		if s.recheckAfter != test.want {
			t.Errorf("%s: reconciled after %s, want %s", name, s.recheckAfter, test.want)
		}
	}
}
