package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	testclock "k8s.io/utils/clock/testing"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// patchRecorder records the patches of Secrets. The first one fails.
type patchRecorder struct {
	corev1client.SecretInterface
	patches []string
}

func (r *patchRecorder) Patch(
	ctx context.Context, _ string, _ types.PatchType, data []byte, _ metav1.PatchOptions, _ ...string,
) (*corev1.Secret, error) {
	r.patches = append(r.patches, string(data))
	if _, limited := ctx.Deadline(); !limited {
		return nil, errors.New("the request has no timeout")
	}
	if len(r.patches) == 1 {
		return nil, errors.New("the member does not answer")
	}
	return &corev1.Secret{}, nil
}

// TestPausedStateIsStoredAgain pauses a cluster whose member refuses the first request.
func TestPausedStateIsStoredAgain(t *testing.T) {
	t.Parallel()
	secrets := &patchRecorder{}
	s := &hubSession{agent: &agent{secrets: secrets, gate: session.NewGate(false)}}
	for range 3 {
		s.setPaused(t.Context(), true)
	}
	if len(secrets.patches) != 2 || !strings.Contains(secrets.patches[1], `"true"`) || s.gate.IsOpen() {
		t.Errorf("patches for a paused cluster: %v, the gate is open: %t", secrets.patches, s.gate.IsOpen())
	}
	s.setPaused(t.Context(), false)
	if len(secrets.patches) != 3 || !strings.Contains(secrets.patches[2], "null") || !s.gate.IsOpen() {
		t.Errorf("patches after the pause: %v, the gate is open: %t", secrets.patches, s.gate.IsOpen())
	}
}

// TestHeartbeatsAreTimedByTheOwnClock observes a member whose clock is far behind.
func TestHeartbeatsAreTimedByTheOwnClock(t *testing.T) {
	t.Parallel()
	clock := testclock.NewFakeClock(time.Now())
	d := &duplicateRegistration{clock: clock}
	lease := func(behind time.Duration) *coordinationv1.Lease {
		return &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kube.AnnotationMember: "other"}},
			Spec:       coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: clock.Now().Add(-behind)}},
		}
	}
	for range 5 {
		if d.observe(lease(time.Hour)) {
			t.Fatal("a member that sends heartbeats is silent")
		}
		clock.Step(takeoverDelay / 2)
	}
	last := lease(time.Hour)
	if d.observe(last) {
		t.Error("the member is silent before the takeover delay has passed")
	}
	clock.Step(takeoverDelay)
	if !d.observe(last) {
		t.Error("the member is not silent after the takeover delay")
	}
}
