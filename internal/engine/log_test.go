package engine_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
)

// logLines collects the log of a test.
type logLines struct {
	mu    sync.Mutex
	lines []string
}

// withLog returns a context with a logger that adds lines to l.
func (l *logLines) withLog(ctx context.Context) context.Context {
	return log.IntoContext(ctx, funcr.NewJSON(func(line string) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.lines = append(l.lines, line)
	}, funcr.Options{}))
}

// values returns the values of the given keys of each line.
func (l *logLines) values(t *testing.T, keys ...string) []string {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for _, line := range l.lines {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		var values []string
		for _, key := range keys {
			if value, ok := fields[key]; ok {
				values = append(values, fmt.Sprint(value))
			}
		}
		all = append(all, strings.Join(values, " "))
	}
	return all
}

func TestLogOfDeliveryDriftAndWithdrawal(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	lines := &logLines{}
	ctx, cancel := context.WithCancel(lines.withLog(t.Context()))
	e := c.engine(nil)
	stopped := make(chan error, 1)
	go func() { stopped <- e.Run(ctx) }()
	defer func() { cancel(); <-stopped }()
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"))
	for range 2 { // the second delivery is unchanged
		if _, err := e.Converge(ctx, b); err != nil {
			t.Fatal(err)
		}
	}
	c.delete(configMaps, "a")
	eventually(t, "corrected", func() bool { return slices.Contains(lines.values(t, "msg"), "corrected drift") })
	if _, err := e.Converge(ctx, c.bundle("one", c.configMap("a", "2"))); err != nil {
		t.Fatal(err)
	}
	if done, err := e.Withdraw(ctx, bundle.Withdrawal{ID: b.ID}); err != nil || !done {
		t.Fatalf("withdraw: done %t, %v", done, err)
	}
	want := []string{
		"applied bundle Applied 2 0 0 0",
		"corrected drift Applied 1 0 0 0",
		"applied bundle Applied 0 1 1 0",
		"withdrew bundle 1",
	}
	got := lines.values(t, "msg", "state", "created", "changed", "deleted", "failed", "objects")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the log differs (-want +got):\n%s", diff)
	}
}
