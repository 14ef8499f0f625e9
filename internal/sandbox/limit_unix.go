//go:build unix

package sandbox

import "syscall"

// limitData limits the memory of this process in bytes.
func limitData(limit uint64) error {
	return syscall.Setrlimit(syscall.RLIMIT_DATA, &syscall.Rlimit{Cur: limit, Max: limit})
}
