package survey

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// streak is a series of equal health results.
type streak struct {
	healthy bool
	since   time.Time
	// count is the number of results in the series.
	count int
	// isFirst is true for the first series of this process.
	isFirst bool
}

// extend returns the series after one more result.
func (s streak) extend(healthy bool, at time.Time) streak {
	if s.count > 0 && s.healthy == healthy {
		s.count++
		return s
	}
	return streak{healthy: healthy, since: at, count: 1, isFirst: s.count == 0}
}

// thresholds are the minimal durations of a series that changes the condition.
type thresholds struct{ success, failure time.Duration }

// applyThresholds returns the condition Ready of a cluster: found, or old (nil if there is none) until the series of
// results has lasted long enough.
//
// Without a known status, found applies at once. So does the first healthy result of a process. But the first unhealthy
// result of a process does not: a ready cluster stays ready until the threshold has passed.
func applyThresholds(old *metav1.Condition, found metav1.Condition, series streak, at time.Time, limits thresholds) metav1.Condition {
	if old == nil || old.Status == metav1.ConditionUnknown || old.Status == found.Status {
		return found
	}
	limit := limits.failure
	if series.healthy {
		limit = limits.success
		if series.isFirst {
			return found
		}
	}
	if at.Sub(series.since) < limit {
		return *old
	}
	return found
}
