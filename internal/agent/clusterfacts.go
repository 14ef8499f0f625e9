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
	"github.com/towline/towline/internal/kube/logkeys"
)

const (
	// factsTimeout limits one read of the facts.
	factsTimeout = 30 * time.Second
	// factsRetryInterval is the time until the next attempt after a failed read.
	factsRetryInterval = 5 * time.Second
	// minKindsDelay is the minimal time from a changed definition to the read of the served kinds. An API server needs
	// time to serve a new kind.
	minKindsDelay = 2 * time.Second
	// maxKindsDelay is the maximal time from a changed definition to the read.
	maxKindsDelay = 30 * time.Second
)

// clusterFacts reads the facts of the member: its version and the kinds that it serves.
type clusterFacts struct {
	member         *rest.Config
	metadataClient metadata.Interface
	clock          clock.Clock
	// reportRequested holds one signal for hubSession.runReports, readRequested one signal for run to read again.
	reportRequested chan struct{}
	readRequested   chan struct{}

	// mu guards facts, the result of the last read.
	mu    sync.Mutex
	facts fleet.Facts
}

func newClusterFacts(member *rest.Config, metadataClient metadata.Interface, clock clock.Clock) *clusterFacts {
	return &clusterFacts{
		member: member, metadataClient: metadataClient, clock: clock, reportRequested: make(chan struct{}, 1), readRequested: make(chan struct{}, 1),
	}
}

// run reads the facts at once, after each factsInterval and on request, until ctx ends. It calls onRead after each
// successful read.
func (f *clusterFacts) run(ctx context.Context, onRead func()) {
	var backoff kindsBackoff
	for {
		pause := factsInterval
		if err := f.read(ctx); err != nil {
			pause = factsRetryInterval
			if ctx.Err() == nil {
				log.FromContext(ctx).Info("cannot read the version and the APIs of the cluster", logkeys.Reason, err.Error())
			}
		} else {
			onRead()
		}
		backoff.lastRead = f.clock.Now()
		timer := f.clock.NewTimer(pause)
		select {
		case <-timer.C():
		case <-f.readRequested:
			timer.Stop()
			if !session.Sleep(ctx, f.clock, min(backoff.delay(f.clock.Now()), pause)) {
				return
			}
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

func (f *clusterFacts) read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	facts, err := fleet.Probe(ctx, f.member)
	if err != nil {
		return err
	}
	f.update(facts)
	return nil
}

// update stores facts, and requests a report if they have changed.
func (f *clusterFacts) update(facts fleet.Facts) {
	f.mu.Lock()
	if !facts.Complete {
		// Facts are incomplete if an APIService is unavailable. The earlier APIs stay, since the hub renders charts for the
		// reported APIs.
		facts.APIVersions = append(facts.APIVersions, f.facts.APIVersions...)
		slices.Sort(facts.APIVersions)
		facts.APIVersions = slices.Compact(facts.APIVersions)
	}
	changed := f.facts.Version != facts.Version || !slices.Equal(f.facts.APIVersions, facts.APIVersions)
	f.facts = facts
	f.mu.Unlock()
	if changed {
		f.requestReport()
	}
}

// latest returns the facts of the last read. Before the first one they have no version.
func (f *clusterFacts) latest() fleet.Facts {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.facts
}

// requestReport requests a report to the hub.
func (f *clusterFacts) requestReport() { session.Signal(f.reportRequested) }

// requestRead requests a read of the facts, because kinds may have changed.
func (f *clusterFacts) requestRead() { session.Signal(f.readRequested) }

// reportedVersion returns the version for the status of the SveltosCluster: fleet.PlainVersion, or an invalid version
// unchanged.
func reportedVersion(facts fleet.Facts) string {
	if plain := fleet.PlainVersion(facts.Version); plain != "" {
		return plain
	}
	return facts.Version
}
