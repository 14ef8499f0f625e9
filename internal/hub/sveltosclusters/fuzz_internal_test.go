package sveltosclusters

import (
	"testing"
	"time"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzWindow evaluates active windows of any expression. The time of the next change is in the future.
func FuzzWindow(f *testing.F) {
	f.Add("0 8 * * 1-5", "0 18 * * *", int64(1767225600), "{}")
	f.Add("@daily", "@every 1h", int64(0), `{"unpause":"2026-01-01T00:00:00Z","pause":"2026-01-02T00:00:00Z","hash":"aGk="}`)
	f.Add("TZ=0", "CRON_TZ=Europe/Rome 0 8 * * *", int64(1), "")
	f.Add("0 0 30 2 *", "0 0 29 2 *", int64(1), "null")
	f.Add("*/0 * * * *", "1-99999999999 * * * *", int64(-1), "x")
	f.Fuzz(func(t *testing.T, from, to string, seconds int64, record string) {
		now := time.Unix(seconds%(1<<33), 0)
		cluster := &libv1beta1.SveltosCluster{}
		cluster.Annotations = map[string]string{AnnotationWindow: record}
		cluster.Spec.ActiveWindow = &libv1beta1.ActiveWindow{From: from, To: to}
		var state windowState
		var err error
		fuzzing.Within(t, 64<<20, func() { state, err = evaluateWindow(cluster, now) })
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		if state.untilNext <= 0 || !state.nextUnpause.After(now) || !state.nextPause.After(now) {
			t.Errorf("at %s the window opens at %s and closes at %s", now, state.nextUnpause, state.nextPause)
		}
		if err := writeWindowRecord(cluster, state); err != nil || readWindowRecord(cluster) == nil {
			t.Errorf("the record cannot be read again: %v", err)
		}
	})
}
