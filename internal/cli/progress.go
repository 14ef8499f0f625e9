package cli

import (
	"sync"
	"time"
)

const (
	// quiet is how long a command may say nothing at first.
	quiet = 2 * time.Second
	// steady is how long it may say nothing when it has said what it is at.
	steady = 10 * time.Second
)

// talk says what a command is doing or waiting for: at once when that changes, and again and again when it takes longer than a person waits
// without wondering.
type talk struct {
	streams  Streams
	began    time.Time
	ticker   *time.Ticker
	finished chan struct{}
	talking  sync.WaitGroup

	// mu guards what, and keeps lines apart.
	mu   sync.Mutex
	what string
}

// startTalk begins with what, which is not said unless it takes long. Call done when it is over.
func startTalk(streams Streams, what string) *talk {
	t := &talk{streams: streams, began: time.Now(), ticker: time.NewTicker(quiet), finished: make(chan struct{}), what: what}
	t.talking.Go(func() {
		for {
			select {
			case <-t.ticker.C:
				t.say()
				t.ticker.Reset(steady)
			case <-t.finished:
				return
			}
		}
	})
	return t
}

// now says what is being waited for, if it is something else than before.
func (t *talk) now(what string) {
	t.mu.Lock()
	changed := t.what != what
	t.what = what
	t.mu.Unlock()
	if changed {
		t.ticker.Reset(steady)
		t.say()
	}
}

// line prints a line as it is, once: what people know from elsewhere, and what is over when it is said.
func (t *talk) line(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ticker.Reset(steady)
	t.streams.say("%s", text)
}

func (t *talk) say() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.streams.say("%s (%.0f s)", t.what, time.Since(t.began).Seconds())
}

// done ends the talk.
func (t *talk) done() {
	t.ticker.Stop()
	close(t.finished)
	t.talking.Wait()
}

// progress says what is being done when that takes long. Call done when it is over.
func progress(streams Streams, what string) (done func()) { return startTalk(streams, what).done }
