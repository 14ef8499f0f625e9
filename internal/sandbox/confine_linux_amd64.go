package sandbox

import "golang.org/x/sys/unix"

// auditArch identifies the architecture of a system call.
const auditArch = unix.AUDIT_ARCH_X86_64

// callsOfArch returns the numbers of the allowed system calls that other architectures do not have.
func callsOfArch() []uint32 {
	return []uint32{unix.SYS_ARCH_PRCTL, unix.SYS_EPOLL_WAIT, unix.SYS_POLL, unix.SYS_TIME}
}
