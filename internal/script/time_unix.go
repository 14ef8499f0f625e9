//go:build unix

package script

import (
	"syscall"
	"time"
)

// processorTime returns the processor time that this process has used.
func processorTime() time.Duration {
	usage := syscall.Rusage{}
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage) // fails for invalid arguments only
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
