package agents

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadOnlyMappings(t *testing.T) {
	t.Parallel()
	const smaps = `00400000-0146a000 r-xp 00000000 fe:00 9978274                            /manager
Size:              16808 kB
Anonymous:             0 kB
0146a000-024df000 r--p 0106a000 fe:00 9978274                            /manager
Anonymous:             0 kB
024df000-0256b000 rw-p 020df000 fe:00 9978274                            /manager
Anonymous:             0 kB
0256b000-0256c000 r--p 020df000 fe:00 9978274                            /relocated
Anonymous:             4 kB
c000000000-c000800000 rw-p 00000000 00:00 0
Anonymous:          8192 kB
7fff1e453000-7fff1e455000 r-xp 00000000 00:00 0                          [vdso]
Anonymous:             0 kB
`
	want := []mapping{{0x400000, 0x146a000}, {0x146a000, 0x24df000}}
	got := readOnlyMappings(bufio.NewScanner(strings.NewReader(smaps)))
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(mapping{})); diff != "" {
		t.Errorf("mappings (-want +got):\n%s", diff)
	}
}

func TestReleasedProgramIsNotResident(t *testing.T) { //nolint:paralleltest // other tests make pages resident
	before := residentFile(t)
	releaseProgramPages()
	if after := residentFile(t); after > before*3/4 {
		t.Errorf("resident pages of files: %d kB before and %d kB after", before, after)
	}
}

// residentFile returns the resident memory of this process that is mapped from files, in kB.
func residentFile(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "RssFile:")
	value, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return value
}
