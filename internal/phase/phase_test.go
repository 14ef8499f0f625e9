package phase_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/phase"
)

func TestRunEndsInOneOutcome(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	tests := map[string]struct {
		errs      map[string]error
		wantKind  phase.Kind
		wantStep  string
		wantAfter time.Duration
		wantRan   []string
	}{
		"all steps pass":       {wantKind: phase.Done, wantRan: []string{"load", "act"}},
		"an error is retried":  {errs: map[string]error{"load": boom}, wantKind: phase.Retriable, wantStep: "load", wantRan: []string{"load"}},
		"a wrapped wait waits": {errs: map[string]error{"act": fmt.Errorf("act: %w", phase.Wait{After: time.Minute})}, wantKind: phase.Waiting, wantStep: "act", wantAfter: time.Minute, wantRan: []string{"load", "act"}},
		"a terminal error":     {errs: map[string]error{"act": phase.TerminalErrorf("act: %w", boom)}, wantKind: phase.Terminal, wantStep: "act", wantRan: []string{"load", "act"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var ran []string
			step := func(name string) phase.Step[*[]string] {
				return phase.Step[*[]string]{Name: name, Run: func(_ context.Context, ran *[]string) error {
					*ran = append(*ran, name)
					return tc.errs[name]
				}}
			}
			got := phase.Run(t.Context(), &ran, []phase.Step[*[]string]{step("load"), step("act")})
			if got.Kind != tc.wantKind || got.Step != tc.wantStep || got.After != tc.wantAfter {
				t.Errorf("Run() = %+v, want %s in %q after %s", got, tc.wantKind, tc.wantStep, tc.wantAfter)
			}
			if !errors.Is(got.Err, tc.errs[tc.wantStep]) && got.Kind != phase.Waiting && got.Kind != phase.Terminal {
				t.Errorf("Run().Err = %v", got.Err)
			}
			if diff := cmp.Diff(tc.wantRan, ran); diff != "" {
				t.Errorf("steps run (-want +got):\n%s", diff)
			}
		})
	}
}
