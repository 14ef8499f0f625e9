package cache_test

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/towline/towline/internal/cache"
)

func TestLeastRecentlyUsedValuesAreDeleted(t *testing.T) {
	t.Parallel()
	c := cache.New[string](10)
	for _, key := range []string{"a", "b", "c"} {
		c.GetOrPut(key, key, 3)
	}
	c.Get("a")
	c.GetOrPut("d", "d", 3)
	for key, want := range map[string]bool{"a": true, "b": false, "c": true, "d": true} {
		if value, ok := c.Get(key); ok != want || ok && value != key {
			t.Errorf("%s: got %q, %t", key, value, ok)
		}
	}
	c.GetOrPut("large", "large", 100)
	if value, ok := c.Get("large"); !ok || value != "large" {
		t.Error("a value that is larger than the limit is not kept")
	}
	if _, ok := c.Get("d"); ok {
		t.Error("values beside one that is larger than the limit are kept")
	}
	if got := c.GetOrPut("large", "other", 1); got != "large" {
		t.Errorf("got %q, want the cached value", got)
	}
	c.Put("large", "small", 1)
	c.Put("e", "e", 9)
	if value, ok := c.Get("large"); !ok || value != "small" {
		t.Errorf("got %q, %t, want the replaced value with its size", value, ok)
	}
}

func TestConcurrentCallersComputeOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := cache.New[int](10)
		var calls atomic.Int32
		block := make(chan struct{})
		compute := func() (int, int, error) {
			calls.Add(1)
			<-block
			return 1, 1, nil
		}
		for range 8 {
			go func() {
				if value, err := c.GetOrCompute("slow", compute); value != 1 || err != nil {
					t.Errorf("got %d, %v", value, err)
				}
			}()
		}
		synctest.Wait()
		// Another key does not wait.
		if value, err := c.GetOrCompute("fast", func() (int, int, error) { return 2, 1, nil }); value != 2 || err != nil {
			t.Errorf("got %d, %v", value, err)
		}
		close(block)
		synctest.Wait()
		if got := calls.Load(); got != 1 {
			t.Errorf("got %d calls, want 1", got)
		}
	})
}

func TestErrorsAreNotCached(t *testing.T) {
	t.Parallel()
	c := cache.New[int](10)
	failure := errors.New("failed")
	if _, err := c.GetOrCompute("key", func() (int, int, error) { return 0, 0, failure }); !errors.Is(err, failure) {
		t.Errorf("got %v", err)
	}
	if value, err := c.GetOrCompute("key", func() (int, int, error) { return 1, 1, nil }); value != 1 || err != nil {
		t.Errorf("got %d, %v", value, err)
	}
}
