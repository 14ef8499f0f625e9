//go:build !unix

package script

import "time"

// processorTime returns the wall-clock time, because the processor time is not available.
func processorTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
