package agents

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// madvCold makes pages the first ones that the kernel reclaims. Kernels before 5.4 do not support it.
const madvCold = 20

// mapping is an address range of this process.
type mapping struct{ start, end uintptr }

// releaseProgramPages releases the pages of this program that cannot be written. Errors are ignored: the pages stay.
func releaseProgramPages() {
	smaps, err := os.Open("/proc/self/smaps")
	if err != nil {
		return
	}
	defer func() { _ = smaps.Close() }()
	for _, m := range readOnlyMappings(bufio.NewScanner(smaps)) {
		for _, advice := range []uintptr{madvCold, syscall.MADV_DONTNEED} {
			_, _, _ = syscall.Syscall(syscall.SYS_MADVISE, m.start, m.end-m.start, advice)
		}
	}
}

// readOnlyMappings returns the read-only mappings of files without modified pages. The kernel can read all their pages
// again. In smaps, a line with the range of a mapping precedes the lines with its fields.
func readOnlyMappings(smaps *bufio.Scanner) []mapping {
	var (
		found   []mapping
		current mapping
		isFile  bool
	)
	for smaps.Scan() {
		fields := strings.Fields(smaps.Text())
		if len(fields) < 2 {
			continue
		}
		if start, end, ok := parseRange(fields[0]); ok {
			// range, permissions, offset, device, inode and path
			current = mapping{start, end}
			isFile = len(fields) == 6 && strings.HasPrefix(fields[1], "r-") && strings.HasPrefix(fields[5], "/")
		} else if isFile && fields[0] == "Anonymous:" && fields[1] == "0" {
			found = append(found, current)
		}
	}
	return found
}

func parseRange(text string) (start, end uintptr, ok bool) {
	first, last, ok := strings.Cut(text, "-")
	if !ok {
		return 0, 0, false
	}
	from, errFrom := strconv.ParseUint(first, 16, 64)
	to, errTo := strconv.ParseUint(last, 16, 64)
	return uintptr(from), uintptr(to), errFrom == nil && errTo == nil
}
