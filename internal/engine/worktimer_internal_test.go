package engine

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestWorkLimitDoesNotCountWaitingForLocks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := newKeyLock[string]()
		unlock, err := g.acquire(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Hour, unlock)
		start := time.Now()
		ctx, cancel := WithWorkLimit(t.Context(), time.Minute)
		defer cancel()
		<-time.After(10 * time.Second)
		free, err := g.acquire(ctx, "a")
		if err != nil || time.Since(start) != time.Hour {
			t.Fatalf("after %s: got %v", time.Since(start), err)
		}
		defer free()
		<-ctx.Done()
		if left := time.Since(start) - time.Hour; left != 50*time.Second || !errors.Is(context.Cause(ctx), ErrTimeUp) || Answered(ctx) {
			t.Errorf("got %v after %s more", context.Cause(ctx), left)
		}
	})
}
