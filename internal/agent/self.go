package agent

import (
	"context"
	"slices"
	"sync"
	"time"

	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/fleet"
)

const (
	// probeLimit is how long the member may take to list its APIs.
	probeLimit = 30 * time.Second
	// probeRetry is the time until the next attempt after the member did not answer.
	probeRetry = 5 * time.Second
	// settleTime is how long a new kind gets to be served before the agent looks.
	settleTime = 2 * time.Second
	// maxKindsDelay is the longest time from a changed definition until the agent looks.
	maxKindsDelay = 30 * time.Second
)

// self is what the agent knows of its own cluster.
type self struct {
	member  *rest.Config
	objects metadata.Interface
	clock   clock.Clock
	// news asks for a report to the hub, kinds for a look at what is served; each holds one request.
	news  chan struct{}
	kinds chan struct{}

	// mu guards facts.
	mu    sync.Mutex
	facts fleet.Facts
}

func newSelf(member *rest.Config, objects metadata.Interface, clock clock.Clock) *self {
	return &self{member: member, objects: objects, clock: clock, news: make(chan struct{}, 1), kinds: make(chan struct{}, 1)}
}

// watch looks at the member at once, when kinds changed, and every ten minutes, until ctx ends. answered is called
// after each success.
func (s *self) watch(ctx context.Context, answered func()) {
	var changes kindsBackoff
	for {
		pause := factsInterval
		if err := s.look(ctx); err != nil {
			pause = probeRetry
			if ctx.Err() == nil {
				log.FromContext(ctx).Info("cannot ask the cluster what it is", "reason", err.Error())
			}
		} else {
			answered()
		}
		changes.read = s.clock.Now()
		timer := s.clock.NewTimer(pause)
		select {
		case <-timer.C():
		case <-s.kinds:
			timer.Stop()
			if !session.Sleep(ctx, s.clock, min(changes.delay(s.clock.Now()), pause)) {
				return
			}
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (s *self) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	facts, err := fleet.Probe(ctx, s.member)
	if err != nil {
		return err
	}
	s.learn(facts)
	return nil
}

// learn takes what the member says; news is reported.
func (s *self) learn(facts fleet.Facts) {
	s.mu.Lock()
	if !facts.Complete {
		// An API that is away for a moment must not change what charts render to.
		facts.APIVersions = append(facts.APIVersions, s.facts.APIVersions...)
		slices.Sort(facts.APIVersions)
		facts.APIVersions = slices.Compact(facts.APIVersions)
	}
	news := s.facts.Version != facts.Version || !slices.Equal(s.facts.APIVersions, facts.APIVersions)
	s.facts = facts
	s.mu.Unlock()
	if news {
		s.announceSoon()
	}
}

func (s *self) known() fleet.Facts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.facts
}

func (s *self) announceSoon() { session.Signal(s.news) }

func (s *self) kindsChanged() { session.Signal(s.kinds) }

// reportedVersion is the version in status: seeds show it without build metadata.
func reportedVersion(facts fleet.Facts) string {
	if plain := fleet.PlainVersion(facts.Version); plain != "" {
		return plain
	}
	return facts.Version
}
