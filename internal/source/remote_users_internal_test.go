package source

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/utils/clock"
)

func TestUsersAreCounted(t *testing.T) {
	t.Parallel()
	users := newRemoteUsers()
	for i, step := range []struct {
		change        func()
		wantShortest  time.Duration
		wantNamespace string
	}{
		{func() { users.set("eu/a", 5) }, 5, "eu"},
		{func() { users.set("eu/b", 3) }, 3, "eu"},
		{func() { users.set("eu/c", 3) }, 3, "eu"},
		{func() { users.set("us/a", 4) }, 3, ""},
		{func() { users.set("us/a", 4) }, 3, ""},
		{func() { users.set("eu/b", 9) }, 3, ""},
		{func() { users.remove("eu/c") }, 4, ""},
		{func() { users.remove("eu/unknown") }, 4, ""},
		{func() { users.remove("us/a") }, 5, "eu"},
		{func() { users.remove("eu/a") }, 9, "eu"},
	} {
		step.change()
		if got := users.shortestInterval(); got != step.wantShortest {
			t.Errorf("step %d: the shortest interval is %d, want %d", i, got, step.wantShortest)
		}
		if got := users.namespace(); got != step.wantNamespace {
			t.Errorf("step %d: the namespace is %q, want %q", i, got, step.wantNamespace)
		}
	}
	users.clear()
	if !users.isEmpty() || users.namespace() != "" {
		t.Errorf("there are users after all were removed: %v", users)
	}
}

// BenchmarkUse replaces the uses of one user of a URL with many users.
func BenchmarkUse(b *testing.B) {
	for _, users := range []int{1, 1000} {
		b.Run(fmt.Sprint(users), func(b *testing.B) {
			f := NewRemoteFetcher(nil, clock.RealClock{})
			uses := []RemoteUse{{Reference: Reference{Kind: KindURL, URL: "https://example.com/a"}, Interval: time.Hour}}
			for i := range users {
				f.replaceUses(fmt.Sprintf("eu/%d", i), uses)
			}
			for b.Loop() {
				f.replaceUses("eu/0", uses)
			}
		})
	}
}
