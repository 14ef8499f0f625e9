package clusters

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"time"

	"github.com/robfig/cron/v3"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// windowReach is how far back a window may have opened or closed last: cron finds nothing that is further ahead either.
const windowReach = 5 * 366 * 24 * time.Hour

// AnnotationWindow on a SveltosCluster holds, in JSON, the turn of its active window that was carried out last. It is
// not kept in the status, which the agent of a pull-mode cluster may write: what is told there is a copy.
const AnnotationWindow = "towline.dev/active-window"

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

// memory is what AnnotationWindow holds.
type memory struct {
	// Unpause and Pause are the turns that were to come next.
	Unpause metav1.Time `json:"unpause"`
	Pause   metav1.Time `json:"pause"`
	// Hash is that of the window which they are of.
	Hash []byte `json:"hash"`
}

// remembered reads the memory of a cluster; nil if there is none, or none that can be read.
func remembered(cluster *libv1beta1.SveltosCluster) *memory {
	text, ok := cluster.Annotations[AnnotationWindow]
	if !ok {
		return nil
	}
	m := &memory{}
	if err := json.Unmarshal([]byte(text), m); err != nil {
		return nil
	}
	return m
}

// remember has the cluster remember t.
func remember(cluster *libv1beta1.SveltosCluster, t turn) error {
	if t.hash == nil {
		delete(cluster.Annotations, AnnotationWindow)
		return nil
	}
	text, err := json.Marshal(memory{Unpause: *t.unpause, Pause: *t.pause, Hash: t.hash})
	if err != nil {
		return fmt.Errorf("encode the turns of the active window: %w", err)
	}
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, AnnotationWindow, string(text))
	return nil
}

// turnOf says what the active window of a cluster makes of it now. Between two turns of the window, people may pause
// and unpause the cluster; its memory tells which turn was carried out last.
func turnOf(cluster *libv1beta1.SveltosCluster, now time.Time) (turn, error) {
	t := turn{paused: cluster.Spec.Paused}
	window, known := cluster.Spec.ActiveWindow, remembered(cluster)
	if window == nil {
		if known != nil && known.Unpause.Before(&known.Pause) {
			// The window that is gone is closed: whoever removes it wants the cluster to go on.
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
	if known == nil || !bytes.Equal(known.Hash, t.hash) || !known.Unpause.After(now) || !known.Pause.After(now) {
		// A window that opens and closes at the same moment is closed.
		t.paused = !last(from, now).After(last(to, now))
	}
	return t, nil
}

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
		// Only people can cure it. The cluster and its memory stay as they are until then, but no turn is to come.
		s.remark(err.Error())
		s.window = &turn{}
		return nil
	}
	s.look(now.wait)
	turned := s.cluster.DeepCopy()
	turned.Spec.Paused = now.paused
	if err := remember(turned, now); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(s.cluster, turned) {
		// With a lock: people who change the window or the pause at this moment are asked again.
		patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
		if err := c.Hub.Patch(ctx, turned, patch, client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("pause or unpause cluster %s: %w", s.member.Key(), err)
		}
		turned.Status = s.cluster.Status
		if turned.Spec.Paused != s.cluster.Spec.Paused {
			defer c.tellTurn(s)
		}
		s.cluster = turned
	}
	s.window = &now
	return nil
}
