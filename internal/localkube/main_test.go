package localkube_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// eventually fails the test unless check says yes within a minute. check returns what it sees, for the message.
func eventually(t *testing.T, what string, check func(context.Context) (bool, string)) {
	t.Helper()
	seen := ""
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		ok, now := check(ctx)
		seen = now
		return ok, nil
	})
	if err != nil {
		t.Fatalf("%s: %v; last seen: %s", what, err, seen)
	}
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one that contains %q", err, text)
	}
}
