package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/join"
)

// refusalInterval is the least time between two messages about one outage.
const refusalInterval = 5 * time.Minute

// refusal tells people what to do about a hub that refuses the agent's credential: when that begins, and now and then while it lasts.
type refusal struct {
	clock  clock.PassiveClock
	repair string

	// mu guards said.
	mu sync.Mutex
	// said is when the last message about the outage was; zero if there is no outage.
	said time.Time
}

// is says whether err means that the hub refuses the credential, and then tells people.
func (r *refusal) is(ctx context.Context, err error) bool {
	if !errors.Is(err, join.ErrRefused) && !apierrors.IsUnauthorized(err) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := r.clock.Now(); r.said.IsZero() || now.Sub(r.said) >= refusalInterval {
		r.said = now
		log.FromContext(ctx).Info("the hub refuses the agent's credential; what is deployed stays and is healed",
			"repair", r.repair, "reason", err.Error())
	}
	return true
}

// over says that the hub accepts the credential.
func (r *refusal) over() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.said = time.Time{}
}
