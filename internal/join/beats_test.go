package join_test

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
)

func TestBeatsAreByOurClock(t *testing.T) {
	t.Parallel()
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(start)}}
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{UID: "1", CreationTimestamp: metav1.NewTime(start)}}
	beats := &join.Beats{}
	look := func(what string, at, want time.Duration) {
		t.Helper()
		if got := beats.Last(cluster, lease, start.Add(at)); !got.Equal(start.Add(want)) {
			t.Errorf("%s: got %s, want %s", what, got, start.Add(want))
		}
	}
	renew := func(at time.Duration) { lease.Spec.RenewTime = &metav1.MicroTime{Time: start.Add(at)} }
	if got := beats.Last(cluster, lease, start); !got.IsZero() {
		t.Errorf("never renewed: got %s", got)
	}
	renew(time.Minute)
	look("seen first", 2*time.Minute, time.Minute)
	renew(time.Second)
	look("a change, by a clock that is behind", 3*time.Minute, 3*time.Minute)
	look("no change", 4*time.Minute, 3*time.Minute)
	renew(1000 * time.Hour)
	look("from the future", 5*time.Minute, 5*time.Minute)
	look("from the future and old", 9*time.Minute, 5*time.Minute)
	lease.UID = "2"
	look("from the future, seen first", 9*time.Minute, 9*time.Minute)
	lease.CreationTimestamp = metav1.NewTime(start.Add(-time.Second))
	if got := beats.Last(cluster, lease, start); !got.IsZero() {
		t.Errorf("from before the cluster: got %s", got)
	}
}
