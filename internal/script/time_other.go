//go:build !unix

package script

import "time"

// processorTime returns the time, since the processor time is not known.
func processorTime() time.Duration { return time.Duration(time.Now().UnixNano()) }
