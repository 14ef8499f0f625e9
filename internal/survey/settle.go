package survey

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// streak is how long a cluster has been found healthy, or not healthy, each time.
type streak struct {
	healthy bool
	since   time.Time
	// times is how often.
	times int
	// first says that no other streak came before.
	first bool
}

// extend returns the streak after one more observation.
func (s streak) extend(healthy bool, at time.Time) streak {
	if s.times > 0 && s.healthy == healthy {
		s.times++
		return s
	}
	return streak{healthy: healthy, since: at, times: 1, first: s.times == 0}
}

// thresholds are how long a streak must last before it counts.
type thresholds struct{ success, failure time.Duration }

// settle returns the condition Ready of a cluster that had old (nil for none), is found as in found, and has been so for as long as run.
//
// A cluster of which nothing was known is as it is found, and so is one that is looked at for the first time. But one that was ready is not
// given up by the first look of somebody who has just begun to look.
func settle(old *metav1.Condition, found metav1.Condition, run streak, now time.Time, limits thresholds) metav1.Condition {
	if old == nil || old.Status == metav1.ConditionUnknown || old.Status == found.Status {
		return found
	}
	limit := limits.failure
	if run.healthy {
		limit = limits.success
		if run.first {
			return found
		}
	}
	if now.Sub(run.since) < limit {
		return *old
	}
	return found
}
