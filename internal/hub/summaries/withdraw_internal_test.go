package summaries

import (
	"context"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
)

// waitingTransport is a Transport to members with objects that stay after their deletion.
type waitingTransport struct{ deliver.Transport }

// Withdraw returns false: objects still exist.
func (waitingTransport) Withdraw(context.Context, fleet.Member, bundle.Withdrawal) (done bool, err error) {
	return false, nil
}

// TestWithdrawalIsNotPolled withdraws a bundle from members whose engine continues the withdrawal and reports its end.
func TestWithdrawalIsNotPolled(t *testing.T) {
	t.Parallel()
	modes := []fleet.Mode{fleet.Push, fleet.Pull, fleet.Local}
	for _, mode := range modes {
		now := time.Now()
		deleted := metav1.NewTime(now)
		s := newState(&configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &deleted}}, nil, fleet.Member{Mode: mode})
		s.deployed = map[libv1beta1.FeatureID]bundle.Deployed{libv1beta1.FeatureResources: {}}
		c := &Controller{
			Transport: waitingTransport{}, Clock: clocktesting.NewFakePassiveClock(now),
			RecheckDelay: map[fleet.Mode]time.Duration{fleet.Push: time.Second, fleet.Local: time.Second},
		}
		if err := c.withdrawFrom(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if s.isWithdrawn || s.recheckAfter != 0 {
			t.Errorf("%v: withdrawn %t, requested again after %s, want never", mode, s.isWithdrawn, s.recheckAfter)
		}
	}
}
