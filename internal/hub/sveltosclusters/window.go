package sveltosclusters

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// maxWindowAge limits the search for the last time when a window opened or closed. The cron library searches the next
// time within the same limit.
const maxWindowAge = 5 * 366 * 24 * time.Hour

// AnnotationWindow on a SveltosCluster contains a windowRecord in JSON: the next times of the active window when the
// controller evaluated it last. The status has a copy. The annotation is authoritative, because the agent of a
// pull-mode cluster can write the status.
const AnnotationWindow = "towline.dev/active-window"

// windowFieldPrefix is the first part of each message about an invalid active window.
const windowFieldPrefix = "spec.activeWindow."

// windowState is the result of the evaluation of an active window at one time.
type windowState struct {
	// paused is the desired spec.paused.
	paused bool
	// nextUnpause and nextPause are the next times when the window opens and closes, and hash identifies the window. They
	// are written to the status and to the annotation; they are nil without a window.
	nextUnpause, nextPause *metav1.Time
	hash                   []byte
	// untilNext is the time until the window opens or closes, 0 without a window.
	untilNext time.Duration
}

// windowRecord is the value of AnnotationWindow.
type windowRecord struct {
	// Unpause and Pause are the next times, seen from the last evaluation, when the window opens and closes.
	Unpause metav1.Time `json:"unpause"`
	Pause   metav1.Time `json:"pause"`
	// Hash identifies the window to which the times belong.
	Hash []byte `json:"hash"`
}

// readWindowRecord returns the record in the annotation of a cluster, nil if it is missing or invalid.
func readWindowRecord(cluster *libv1beta1.SveltosCluster) *windowRecord {
	text, ok := cluster.Annotations[AnnotationWindow]
	if !ok {
		return nil
	}
	record := &windowRecord{}
	if err := json.Unmarshal([]byte(text), record); err != nil {
		return nil
	}
	return record
}

// writeWindowRecord sets the annotation of cluster, in memory, to the times of desired. It removes it without a window.
func writeWindowRecord(cluster *libv1beta1.SveltosCluster, desired windowState) error {
	if desired.hash == nil {
		delete(cluster.Annotations, AnnotationWindow)
		return nil
	}
	text, err := json.Marshal(windowRecord{Unpause: *desired.nextUnpause, Pause: *desired.nextPause, Hash: desired.hash})
	if err != nil {
		return fmt.Errorf("encode the times of the active window: %w", err)
	}
	metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, AnnotationWindow, string(text))
	return nil
}

// evaluateWindow evaluates the active window of a cluster. The result differs from spec.paused only if the window is
// new, or has opened or closed since the annotation was written. In between users can change spec.paused.
func evaluateWindow(cluster *libv1beta1.SveltosCluster, now time.Time) (windowState, error) {
	result := windowState{paused: cluster.Spec.Paused}
	window, record := cluster.Spec.ActiveWindow, readWindowRecord(cluster)
	if window == nil {
		if record != nil && record.Unpause.Before(&record.Pause) {
			// A user has removed the window while it was closed: the cluster must not stay paused.
			result.paused = false
		}
		return result, nil
	}
	from, err := parseCron(window.From)
	if err != nil {
		return result, fmt.Errorf(windowFieldPrefix+"from: %w", err)
	}
	to, err := parseCron(window.To)
	if err != nil {
		return result, fmt.Errorf(windowFieldPrefix+"to: %w", err)
	}
	now = now.UTC()
	opens, closes := from.Next(now), to.Next(now)
	if opens.IsZero() {
		return result, fmt.Errorf(windowFieldPrefix+"from: %q never fires", window.From)
	}
	if closes.IsZero() {
		return result, fmt.Errorf(windowFieldPrefix+"to: %q never fires", window.To)
	}
	hash := sha256.Sum256([]byte(window.From + window.To))
	result.hash, result.untilNext = hash[:], min(opens.Sub(now), closes.Sub(now))
	result.nextUnpause, result.nextPause = &metav1.Time{Time: opens}, &metav1.Time{Time: closes}
	if record == nil || !bytes.Equal(record.Hash, result.hash) || !record.Unpause.After(now) || !record.Pause.After(now) {
		// A window that opens and closes at the same moment is closed.
		result.paused = !lastFired(from, now).After(lastFired(to, now))
	}
	return result, nil
}

// parseCron parses an expression in the format of Sveltos: five fields, or a name like @daily. Times are in UTC unless
// the expression has a time zone.
func parseCron(expression string) (cron.Schedule, error) {
	if strings.Contains(expression, "TZ=") && !strings.Contains(expression, " ") {
		return nil, fmt.Errorf("%q is not a cron expression: it has a time zone alone", expression) // the library panics
	}
	schedule, err := cron.ParseStandard(expression)
	if err != nil {
		return nil, fmt.Errorf("%q is not a cron expression: %s", expression, kube.OneLine(err.Error()))
	}
	if _, relative := schedule.(cron.ConstantDelaySchedule); relative {
		return nil, fmt.Errorf("%q is not supported: %w", expression, errors.New("@every is an interval, not a time"))
	}
	return schedule, nil
}

// lastFired returns the last time until now when schedule fired. It returns the zero time if schedule did not fire
// within maxWindowAge. schedule can only compute the next time, so lastFired is a binary search.
func lastFired(schedule cron.Schedule, now time.Time) time.Time {
	hasFiredWithin := func(secondsAgo int) bool {
		next := schedule.Next(now.Add(-time.Duration(secondsAgo) * time.Second))
		return !next.IsZero() && !next.After(now)
	}
	maxSeconds := int(maxWindowAge / time.Second)
	secondsAgo := sort.Search(maxSeconds, hasFiredWithin)
	if secondsAgo == maxSeconds {
		return time.Time{}
	}
	return schedule.Next(now.Add(-time.Duration(secondsAgo) * time.Second))
}

// applyWindow sets spec.paused by the active window.
func (c *Controller) applyWindow(ctx context.Context, s *state) error {
	if s.member.Deleting {
		return nil
	}
	desired, err := evaluateWindow(s.cluster, c.Clock.Now())
	if err != nil {
		// Only a user can correct the window. The cluster and its annotation do not change, and the status gets no next
		// times.
		s.addProblem(err.Error())
		s.window = &windowState{}
		return nil
	}
	s.requeueWithin(desired.untilNext)
	patched := s.cluster.DeepCopy()
	patched.Spec.Paused = desired.paused
	if err := writeWindowRecord(patched, desired); err != nil {
		return err
	}
	if !equality.Semantic.DeepEqual(s.cluster, patched) {
		// Optimistic lock: if a user changes the window or the pause concurrently, the evaluation is repeated.
		patch := client.MergeFromWithOptions(s.cluster, client.MergeFromWithOptimisticLock{})
		if err := c.Hub.Patch(ctx, patched, patch, client.FieldOwner(kube.FieldManager)); err != nil {
			return fmt.Errorf("pause or unpause cluster %s: %w", s.member.Key(), err)
		}
		patched.Status = s.cluster.Status
		hasChanged := patched.Spec.Paused != s.cluster.Spec.Paused
		if s.cluster = patched; hasChanged {
			c.recordPauseEvent(s)
		}
	}
	s.window = &desired
	return nil
}
