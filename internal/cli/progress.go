package cli

import (
	"sync"
	"time"
)

// quiet is how long a command may say nothing.
const quiet = 2 * time.Second

// progress says what is being done, again and again, when that takes longer than a person waits without wondering. Call done when it is over.
func progress(streams Streams, what string) (done func()) {
	finished := make(chan struct{})
	var talking sync.WaitGroup
	talking.Go(func() {
		ticker := time.NewTicker(quiet)
		defer ticker.Stop()
		began := time.Now()
		for {
			select {
			case <-ticker.C:
				streams.say("%s (%.0f s)", what, time.Since(began).Seconds())
			case <-finished:
				return
			}
		}
	})
	return func() {
		close(finished)
		talking.Wait()
	}
}
