//go:build amd64 || arm64

package sandbox

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// confine limits the system calls of this process, with all its threads, to those that a Go program needs to compute
// and to read and write open files. All others fail. So a function that executes code of its input, through a bug in an
// interpreter, cannot open files (such as the token of the hub in its pod), connect to the network, start programs, or
// act on other processes. It cannot be undone. It returns an error if the kernel does not support seccomp filters.
func confine() error {
	// The kernel requires no_new_privs for a filter. All threads get it together with the filter.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	filter := systemCallFilter(uint32(os.Getpid()))                         //nolint:gosec // it is positive
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]} //nolint:gosec // it has about a hundred instructions
	failed, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	if failed != 0 {
		return fmt.Errorf("thread %d has another filter", failed)
	}
	return nil
}

// The offsets of the fields of struct seccomp_data.
const (
	offsetNumber = 0
	offsetArch   = 4
)

// argument returns the offset of the lower half of the argument with this index.
func argument(index uint32) uint32 { return 16 + 8*index }

// systemCallFilter returns the BPF program of confine. pid is the ID of this process.
func systemCallFilter(pid uint32) []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	result := func(action, errno uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action | errno}
	}
	// equal continues if the loaded value is value. Otherwise it skips a number of instructions.
	equal := func(value uint32, skipped uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: skipped, K: value}
	}
	allow, deny := result(unix.SECCOMP_RET_ALLOW, 0), result(unix.SECCOMP_RET_ERRNO, uint32(unix.EPERM))
	filter := []unix.SockFilter{
		// System calls of another architecture have other numbers.
		load(offsetArch),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 1, K: auditArch}, deny,
		load(offsetNumber),
	}
	for _, number := range allowedCalls() {
		filter = append(filter, equal(number, 1), allow)
	}
	return append(filter,
		// fcntl: other commands can make the kernel send signals to any process of the user.
		equal(unix.SYS_FCNTL, 6), load(argument(1)), equal(unix.F_GETFL, 1), allow, equal(unix.F_SETFL, 1), allow, deny,
		// mmap: shared memory does not count against the limit of memory.
		equal(unix.SYS_MMAP, 4), load(argument(3)),
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, Jf: 1, K: unix.MAP_SHARED}, deny, allow,
		// tgkill: the runtime of Go sends signals to its own threads.
		equal(unix.SYS_TGKILL, 4), load(argument(0)), equal(pid, 1), allow, deny,
		// clone: threads only. A new process could outlast the limit of time.
		equal(unix.SYS_CLONE, 4), load(argument(0)),
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, Jf: 1, K: unix.CLONE_THREAD}, allow, deny,
		// clone3: a filter cannot read its flags, which are in memory. After ENOSYS, C libraries use clone.
		equal(unix.SYS_CLONE3, 1), result(unix.SECCOMP_RET_ERRNO, uint32(unix.ENOSYS)),
		deny,
	)
}

// allowedCalls returns the numbers of the system calls that are allowed with all arguments.
func allowedCalls() []uint32 {
	return append([]uint32{
		// Memory.
		unix.SYS_BRK, unix.SYS_MADVISE, unix.SYS_MINCORE, unix.SYS_MPROTECT, unix.SYS_MREMAP, unix.SYS_MUNMAP,
		// Files that are open already: the standard streams and the pipes of the Go runtime.
		unix.SYS_CLOSE, unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EVENTFD2, unix.SYS_FSTAT,
		unix.SYS_LSEEK, unix.SYS_PIPE2, unix.SYS_PPOLL, unix.SYS_READ, unix.SYS_READV, unix.SYS_WRITE, unix.SYS_WRITEV,
		// Threads, signals to itself, and time.
		unix.SYS_CLOCK_GETRES, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_FUTEX, unix.SYS_GETPID,
		unix.SYS_GETTID, unix.SYS_GETTIMEOFDAY, unix.SYS_MEMBARRIER, unix.SYS_NANOSLEEP, unix.SYS_RESTART_SYSCALL, unix.SYS_RSEQ,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_YIELD,
		unix.SYS_SET_ROBUST_LIST, unix.SYS_SETITIMER, unix.SYS_SIGALTSTACK, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_DELETE, unix.SYS_TIMER_SETTIME,
		unix.SYS_GETRANDOM, unix.SYS_GETRUSAGE, unix.SYS_UNAME,
	}, callsOfArch()...)
}
