package clusterstatus

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
	// isFirst is true for the first series of an Observer.
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

// thresholds are how long a series must last until it changes the condition.
type thresholds struct{ success, failure time.Duration }

// applyThresholds returns the condition Ready of a cluster: old until the series of results has lasted long enough,
// then observed.
//
// observed applies at once if old is nil or Unknown, or if the first series of an Observer is healthy. After a restart,
// a healthy cluster becomes ready at once, and an unhealthy one stays ready until the threshold has passed.
func applyThresholds(old *metav1.Condition, observed metav1.Condition, series streak, at time.Time, limits thresholds) metav1.Condition {
	if old == nil || old.Status == metav1.ConditionUnknown || old.Status == observed.Status {
		return observed
	}
	limit := limits.failure
	if series.healthy {
		limit = limits.success
		if series.isFirst {
			return observed
		}
	}
	if at.Sub(series.since) < limit {
		return *old
	}
	return observed
}
