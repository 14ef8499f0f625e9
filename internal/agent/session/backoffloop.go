package session

import (
	"context"
	"math/rand/v2"
	"time"

	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/log"
)

const (
	// minRetryDelay is the delay after the first failure of a BackoffLoop.
	minRetryDelay = time.Second
	// MaxRetryDelay is the maximum delay between attempts to reach the hub. Up to three loops are nested, such as the
	// loops of the connection and of its watches. Their delays add up to 30 s at most.
	MaxRetryDelay = 10 * time.Second
	// stableTime is the time after which an attempt counts as a success and resets the delay. It is longer than the
	// timeout of a request.
	stableTime = 30 * time.Second
	// jitter is the largest fraction by which Jitter shortens a delay.
	jitter = 0.2
)

// BackoffLoop runs the long-lived tasks of an agent. All fields are required.
type BackoffLoop struct {
	Clock clock.Clock
	// BeforeAttempt is called before each attempt.
	BeforeAttempt func()
	// IsFinal returns true for errors that end the loop.
	IsFinal func(error) bool
	// LogError logs an error. It returns false for errors that it does not know, which the loop then logs itself.
	LogError func(context.Context, error) bool
}

// Run runs task until ctx ends or task returns a final error, which Run returns. It restarts task after a growing
// delay, also if task returns nil. action completes the log message "cannot <action>".
func (l BackoffLoop) Run(ctx context.Context, action string, task func(context.Context) error) error {
	pause := minRetryDelay
	for {
		l.BeforeAttempt()
		started := l.Clock.Now()
		err := task(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // ctx has ended, and its end explains the error
		}
		if err != nil && l.IsFinal(err) {
			return err
		}
		if l.Clock.Since(started) > stableTime {
			pause = minRetryDelay
		}
		if err != nil && !l.LogError(ctx, err) {
			log.FromContext(ctx).Info("cannot "+action+"; retrying", "reason", err.Error())
		}
		if !Sleep(ctx, l.Clock, Jitter(pause)) {
			return nil
		}
		pause = min(pause*2, MaxRetryDelay)
	}
}

// Jitter shortens a delay at random, to spread the requests of many agents.
func Jitter(delay time.Duration) time.Duration {
	return time.Duration(float64(delay) * (1 - jitter*rand.Float64()))
}

// SleepOrWake waits until the pause has passed or wake receives a value. It returns false if ctx ended first.
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

// Sleep waits for the pause. It returns false if ctx ended first.
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

// Signal sends to c, which has a buffer of one, unless a signal is pending already.
func Signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
