package cli_test

import (
	"bytes"
	"context"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
)

// seconds is the time in a line of progress.
var seconds = regexp.MustCompile(`\(\d+ s\)`)

// TestProgressWhileTheServerDoesNotRespond shows that the current step is printed again, and other lines only once.
func TestProgressWhileTheServerDoesNotRespond(t *testing.T) {
	t.Parallel()
	const warning = "warning: --cluster-namespace=karmada-system is the namespace of the control plane itself; it is never deleted with a cluster\n"
	for args, want := range map[string]string{
		"token create":        "creating a token on the control plane (N s)\n",
		"token list":          "listing the tokens of the control plane (N s)\n",
		"token delete abcdef": "deleting tokens on the control plane (N s)\n",
		"unjoin c":            "waiting for the control plane to finish removing cluster c (N s)\n",
		"join c --cluster-namespace=karmada-system --cluster-kubeconfig=SILENT": warning,
	} {
		t.Run(strings.Fields(args)[0]+"-"+strings.Fields(args)[1], func(t *testing.T) {
			t.Parallel()
			path := kubeconfigOf(t, "https://"+startSilentServer(t, func() {}))
			ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
			defer cancel()
			var out, errs bytes.Buffer
			args := append(strings.Fields("karmadactl "+strings.ReplaceAll(args, "SILENT", path)), "--kubeconfig="+path)
			cli.Run(ctx, args, command.Streams{Out: &out, Err: &errs})
			progress, end, found := strings.Cut(seconds.ReplaceAllString(errs.String(), "(N s)"), "error: ")
			if progress != want || !found || strings.Count(end, "\n") != 1 {
				t.Errorf("got error output %q, want %q and an error", errs.String(), want)
			}
		})
	}
}
