package sveltosclusters

import (
	"crypto/sha256"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// at parses a time in January 2026. The first of January is a Thursday.
func at(t *testing.T, text string) time.Time {
	t.Helper()
	when, err := time.Parse("2006-01-02 15:04:05", "2026-01-"+text)
	if err != nil {
		t.Fatal(err)
	}
	return when
}

func TestWindowOpensAndCloses(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		from, to, now   string
		paused          bool // the desired spec.paused for a new window
		unpause, closes string
	}{
		"before it opens":            {"0 8 * * *", "0 17 * * *", "02 07:59:59", true, "02 08:00:00", "02 17:00:00"},
		"at the moment it opens":     {"0 8 * * *", "0 17 * * *", "02 08:00:00", false, "03 08:00:00", "02 17:00:00"},
		"while it is open":           {"0 8 * * *", "0 17 * * *", "02 12:00:00", false, "03 08:00:00", "02 17:00:00"},
		"at the moment it closes":    {"0 8 * * *", "0 17 * * *", "02 17:00:00", true, "03 08:00:00", "03 17:00:00"},
		"over midnight, at night":    {"0 22 * * *", "0 4 * * *", "02 01:00:00", false, "02 22:00:00", "02 04:00:00"},
		"over midnight, by day":      {"0 22 * * *", "0 4 * * *", "02 12:00:00", true, "02 22:00:00", "03 04:00:00"},
		"the weekend":                {"0 20 * * 5", "0 6 * * 1", "03 12:00:00", false, "09 20:00:00", "05 06:00:00"},
		"it opens twice":             {"0 8,9 * * *", "0 17 * * *", "02 08:30:00", false, "02 09:00:00", "02 17:00:00"},
		"it closes twice":            {"0 8 * * *", "0 16,17 * * *", "02 16:30:00", true, "03 08:00:00", "02 17:00:00"},
		"it opens and closes at one": {"0 8 * * *", "0 8 * * *", "02 08:00:00", true, "03 08:00:00", "03 08:00:00"},
		"by name":                    {"@daily", "0 6 * * *", "02 05:00:00", false, "03 00:00:00", "02 06:00:00"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := &libv1beta1.SveltosCluster{}
			cluster.Spec.ActiveWindow = &libv1beta1.ActiveWindow{From: tc.from, To: tc.to}
			cluster.Spec.Paused = !tc.paused
			now := at(t, tc.now)
			got, err := evaluateWindow(cluster, now)
			hash := sha256.Sum256([]byte(tc.from + tc.to))
			unpause, pause := at(t, tc.unpause), at(t, tc.closes)
			want := windowState{
				paused: tc.paused, nextUnpause: &metav1.Time{Time: unpause}, nextPause: &metav1.Time{Time: pause}, hash: hash[:],
				untilNext: min(unpause.Sub(now), pause.Sub(now)),
			}
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(windowState{})); diff != "" || err != nil {
				t.Errorf("turnOf() error %v (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestWindowKeepsUserPauseBetweenItsTimes(t *testing.T) {
	t.Parallel()
	window := &libv1beta1.ActiveWindow{From: "0 8 * * *", To: "0 17 * * *"}
	hash := sha256.Sum256([]byte(window.From + window.To))
	memory := func(unpause, pause string) windowState {
		return windowState{nextUnpause: &metav1.Time{Time: at(t, unpause)}, nextPause: &metav1.Time{Time: at(t, pause)}, hash: hash[:]}
	}
	open, closed := memory("03 08:00:00", "02 17:00:00"), memory("03 08:00:00", "03 17:00:00")
	tests := map[string]struct {
		window *libv1beta1.ActiveWindow
		memory windowState
		now    string
		paused bool
		want   bool
	}{
		"paused by hand while it is open":         {window, open, "02 12:00:00", true, true},
		"unpaused by hand while it is closed":     {window, closed, "02 20:00:00", false, false},
		"the next turn is due":                    {window, open, "02 17:00:00", false, true},
		"the next turn was missed":                {window, open, "02 20:00:00", false, true},
		"two turns were missed":                   {window, open, "03 09:00:00", true, false},
		"the window was changed":                  {&libv1beta1.ActiveWindow{From: "0 18 * * *", To: "0 23 * * *"}, open, "02 12:00:00", false, true},
		"removed while it is closed":              {nil, closed, "02 20:00:00", true, false},
		"removed while it is open":                {nil, open, "02 12:00:00", false, false},
		"removed while it is open, but by hand":   {nil, open, "02 12:00:00", true, true},
		"paused by hand, and never had a window":  {nil, windowState{}, "02 12:00:00", true, true},
		"a window for a cluster paused by people": {window, windowState{}, "02 12:00:00", true, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := &libv1beta1.SveltosCluster{}
			if err := writeWindowRecord(cluster, tc.memory); err != nil {
				t.Fatal(err)
			}
			cluster.Spec.ActiveWindow, cluster.Spec.Paused = tc.window, tc.paused
			if got, err := evaluateWindow(cluster, at(t, tc.now)); err != nil || got.paused != tc.want {
				t.Errorf("turnOf() paused = %t, %v, want %t", got.paused, err, tc.want)
			}
		})
	}
}

func TestInvalidWindowIsReported(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ from, to, want string }{
		"no cron":    {"at eight", "0 17 * * *", `spec.activeWindow.from: "at eight" is not a cron expression: `},
		"one field":  {"0 8 * * *", "17", `spec.activeWindow.to: "17" is not a cron expression: `},
		"no time":    {"@every 1h", "0 17 * * *", `spec.activeWindow.from: "@every 1h" is not supported: `},
		"never":      {"0 8 * * *", "0 0 31 2 *", `spec.activeWindow.to: "0 0 31 2 *" never fires`},
		"hour of 25": {"0 25 * * *", "0 17 * * *", `spec.activeWindow.from: "0 25 * * *" is not a cron expression: `},
	}
	for name, tc := range tests {
		cluster := &libv1beta1.SveltosCluster{}
		cluster.Spec.ActiveWindow = &libv1beta1.ActiveWindow{From: tc.from, To: tc.to}
		if _, err := evaluateWindow(cluster, at(t, "02 12:00:00")); err == nil || !strings.HasPrefix(err.Error(), tc.want) {
			t.Errorf("%s: turnOf() error = %v, want %q", name, err, tc.want)
		}
	}
}
