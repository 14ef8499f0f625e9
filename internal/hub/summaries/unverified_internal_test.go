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

// No watch tells when a signature comes to a repository. Other errors that only the user can cure wait for a change of
// what is watched.
func TestUnverifiedChartIsLookedAtAgain(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want time.Duration
	}{
		"not verified":  {phase.Invalidf("chart hello: %w", source.ErrUnverified), unverifiedInterval},
		"invalid":       {phase.Invalid{Err: errors.New("no such field")}, 0},
		"not reachable": {errors.New("connection refused"), 0},
	} {
		s := &state{summary: &configv1beta1.ClusterSummary{}}
		s.reportFailure(libv1beta1.FeatureHelm, withReason("SourceFailed", test.err))
		if s.recheckAfter != test.want {
			t.Errorf("%s: looked at again after %s, want %s", name, s.recheckAfter, test.want)
		}
	}
}
