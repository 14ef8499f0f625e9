package session

import (
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// retryFirst and retryLast bound the growing time between attempts of what runs for the agent's whole life.
	retryFirst = time.Second
	retryLast  = 30 * time.Second
	// jitter spreads the attempts of a fleet: each comes up to a fifth of the pause early.
	jitter = 0.2
)

// Persistence runs what an agent does for its whole life.
type Persistence struct {
	Clock clock.Clock
	// Turned is called before each attempt.
	Turned func()
	// Ends says whether an error is the end of it.
	Ends func(error) bool
	// Told says whether people were told of an error already.
	Told func(context.Context, error) bool
}

// Run runs work, and runs it again when it ends, after a growing pause, until ctx ends or work returns an error that is the end: that
// error it returns.
func (p Persistence) Run(ctx context.Context, what string, work func(context.Context) error) error {
	pause := retryFirst
	for {
		p.Turned()
		began := p.Clock.Now()
		err := work(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // ctx has ended, and with it whatever work did
		}
		if err != nil && p.Ends(err) {
			return err
		}
		if p.Clock.Since(began) > retryLast {
			pause = retryFirst
		}
		if err != nil && !p.Told(ctx, err) {
			log.FromContext(ctx).Info("cannot "+what+" now; trying again", "reason", err.Error())
		}
		if !Sleep(ctx, p.Clock, time.Duration(float64(pause)*(1-jitter*rand.Float64()))) {
			return nil
		}
		pause = min(pause*2, retryLast)
	}
}

// SleepOrWake waits until the pause is over or wake has a value; it returns false if ctx ended first.
func SleepOrWake(ctx context.Context, clock clock.Clock, pause time.Duration, wake <-chan struct{}) bool {
	timer := clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-wake:
	case <-ctx.Done():
		return false
	}
	return true
}

// Sleep waits; it returns false if ctx ended first.
func Sleep(ctx context.Context, clock clock.Clock, pause time.Duration) bool {
	timer := clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C():
		return true
	case <-ctx.Done():
		return false
	}
}

// Request puts a request into c, which holds one.
func Request(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
