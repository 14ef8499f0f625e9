package clusters

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sort"
	"time"

	"github.com/robfig/cron/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// windowReach is how far back a window may have opened or closed last: cron finds nothing that is further ahead either.
const windowReach = 5 * 366 * 24 * time.Hour

// windowField begins what is wrong with an active window.
const windowField = "spec.activeWindow."

// turn is what an active window makes of a cluster at one moment.
type turn struct {
	// paused is what spec.paused shall be.
	paused bool
	// unpause, pause and hash are for the status; nil without a window.
	unpause, pause *metav1.Time
	hash           []byte
	// wait is the time until the window opens or closes next, 0 without a window.
	wait time.Duration
}

// turnOf says what the active window of a cluster makes of it now. Between two turns of the window, people may pause and unpause the
// cluster; what is in status tells which turn was carried out last.
func turnOf(cluster *libv1beta1.SveltosCluster, now time.Time) (turn, error) {
	t := turn{paused: cluster.Spec.Paused}
	window, status := cluster.Spec.ActiveWindow, cluster.Status
	if window == nil {
		if pausedByWindow(status) {
			t.paused = false
		}
		return t, nil
	}
	from, err := parseCron(window.From)
	if err != nil {
		return t, fmt.Errorf(windowField+"from: %w", err)
	}
	to, err := parseCron(window.To)
	if err != nil {
		return t, fmt.Errorf(windowField+"to: %w", err)
	}
	now = now.UTC()
	opens, closes := from.Next(now), to.Next(now)
	if opens.IsZero() {
		return t, fmt.Errorf(windowField+"from: %q never comes", window.From)
	}
	if closes.IsZero() {
		return t, fmt.Errorf(windowField+"to: %q never comes", window.To)
	}
	hash := sha256.Sum256([]byte(window.From + window.To))
	t.hash, t.wait = hash[:], min(opens.Sub(now), closes.Sub(now))
	t.unpause, t.pause = &metav1.Time{Time: opens}, &metav1.Time{Time: closes}
	if !bytes.Equal(status.ActiveWindowHash, t.hash) || passed(status.NextUnpause, now) || passed(status.NextPause, now) {
		// A window that opens and closes at the same moment is closed.
		t.paused = !last(from, now).After(last(to, now))
	}
	return t, nil
}

// pausedByWindow says whether the window that status tells of is closed: whoever removes it wants the cluster to go on.
func pausedByWindow(status libv1beta1.SveltosClusterStatus) bool {
	return status.NextUnpause != nil && status.NextPause != nil && status.NextUnpause.Before(status.NextPause)
}

// passed says whether a turn that was to come is due or over; one that is not known is.
func passed(turn *metav1.Time, now time.Time) bool { return turn == nil || !turn.After(now) }

// parseCron reads an expression as the Sveltos surface does: five fields, or a name like @daily.
func parseCron(expression string) (cron.Schedule, error) {
	schedule, err := cron.ParseStandard(expression)
	if err != nil {
		return nil, fmt.Errorf("%q is no cron expression: %w", expression, err)
	}
	if _, relative := schedule.(cron.ConstantDelaySchedule); relative {
		return nil, fmt.Errorf("%q is no time of day: %w", expression, errors.New("@every says only how often"))
	}
	return schedule, nil
}

// last returns when schedule fired last, up to and including now; the zero time if it did not within windowReach.
func last(schedule cron.Schedule, now time.Time) time.Time {
	fires := func(ago int) bool {
		next := schedule.Next(now.Add(-time.Duration(ago) * time.Second))
		return !next.IsZero() && !next.After(now)
	}
	most := int(windowReach / time.Second)
	ago := sort.Search(most, fires)
	if ago == most {
		return time.Time{}
	}
	return schedule.Next(now.Add(-time.Duration(ago) * time.Second))
}

// window pauses and unpauses the cluster by the clock.
func (c *Controller) window(ctx context.Context, s *state) error {
	if s.member.Deleting {
		return nil
	}
	now, err := turnOf(s.cluster, c.Clock.Now())
	if err != nil {
		// Only people can cure it; everything stays as it is until then.
		s.remark(err.Error())
		return nil
	}
	s.look(now.wait)
	if now.paused != s.cluster.Spec.Paused {
		paused := s.cluster.DeepCopy()
		paused.Spec.Paused = now.paused
		// With a lock: people who change the window or the pause at this moment are asked again.
		patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
		if err := c.Hub.Patch(ctx, paused, patch, client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("pause or unpause cluster %s: %w", s.member.Key(), err)
		}
		paused.Status = s.cluster.Status
		s.cluster = paused
		c.tellTurn(s)
	}
	s.window = &now
	return nil
}
