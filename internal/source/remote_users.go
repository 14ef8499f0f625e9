package source

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// remoteUsers has the users of a URL. It counts them by interval and by namespace, so that shortestInterval and
// namespace are fast: thousands of ClusterSummaries can use one URL.
type remoteUsers struct {
	intervals   map[string]time.Duration // by user
	byInterval  map[time.Duration]int
	byNamespace map[string]int
}

func newRemoteUsers() remoteUsers {
	return remoteUsers{intervals: map[string]time.Duration{}, byInterval: map[time.Duration]int{}, byNamespace: map[string]int{}}
}

func (u remoteUsers) isEmpty() bool { return len(u.intervals) == 0 }

// set adds a user, or replaces its interval.
func (u remoteUsers) set(user string, interval time.Duration) {
	u.remove(user)
	u.intervals[user] = interval
	u.byInterval[interval]++
	u.byNamespace[namespaceOf(user)]++
}

// remove removes a user if there is one.
func (u remoteUsers) remove(user string) {
	interval, ok := u.intervals[user]
	if !ok {
		return
	}
	delete(u.intervals, user)
	decrement(u.byInterval, interval)
	decrement(u.byNamespace, namespaceOf(user))
}

// clear removes all users.
func (u remoteUsers) clear() {
	clear(u.intervals)
	clear(u.byInterval)
	clear(u.byNamespace)
}

// shortestInterval returns the shortest interval. There must be a user.
func (u remoteUsers) shortestInterval() time.Duration {
	return slices.Min(slices.Collect(maps.Keys(u.byInterval)))
}

// namespace returns the namespace of all users, "" if they are in several namespaces or if there are none.
func (u remoteUsers) namespace() string {
	if len(u.byNamespace) != 1 {
		return ""
	}
	for namespace := range u.byNamespace {
		return namespace
	}
	return ""
}

// namespaceOf returns the namespace of a user, which is "<namespace>/<name>".
func namespaceOf(user string) string {
	namespace, _, _ := strings.Cut(user, "/")
	return namespace
}

func decrement[K comparable](counts map[K]int, key K) {
	counts[key]--
	if counts[key] == 0 {
		delete(counts, key)
	}
}
