package sandbox

import "github.com/prometheus/procfs"

// usedMemory returns the memory of the child that it does not share with other processes, in bytes. It returns zero if
// the child has ended, or the system has no /proc.
func (c *child) usedMemory() int64 {
	process, err := procfs.NewProc(c.process.Process.Pid)
	if err != nil {
		return 0
	}
	status, err := process.NewStatus()
	if err != nil {
		return 0
	}
	return int64(status.RssAnon) //nolint:gosec // it is less than the memory of the machine
}
