// Package fuzzing has the checks that the fuzz targets of all packages share: limits of time and memory, and errors
// that can be written to a status.
package fuzzing

import (
	"bytes"
	"runtime/metrics"
	"strings"
	"testing"
	"time"
)

const (
	// maxTime is a loose limit for one input: a slow machine must pass. The testing package stops an input after 10 s.
	maxTime = 8 * time.Second
	// minSecret is the length from which a text counts as a secret.
	minSecret = 8
	// allocated is the number of bytes that this process has allocated since its start.
	allocated = "/gc/heap/allocs:bytes"
)

// Within fails the test if run allocates more than the given number of bytes in total, or if it takes too long. The
// target must not run in parallel with itself: go test -parallel=1.
func Within(t *testing.T, maxBytes uint64, run func()) {
	t.Helper()
	before, start := allocatedBytes(), time.Now()
	run()
	if used := allocatedBytes() - before; used > maxBytes {
		t.Errorf("it allocated %d KiB, want at most %d", used>>10, maxBytes>>10)
	}
	if took := time.Since(start); took > maxTime {
		t.Errorf("it took %s", took)
	}
}

func allocatedBytes() uint64 {
	sample := []metrics.Sample{{Name: allocated}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// OneLine fails the test unless the message of err is one line of printable length: it is written to conditions and
// logs. A nil err is accepted.
func OneLine(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if text := err.Error(); text == "" || strings.ContainsAny(text, "\n\r") {
		t.Errorf("the error is not one line: %q", text)
	}
}

// HidesSecret fails the test if the message of err contains secret. It ignores short secrets, and those that are in the
// input more than once, because the other place may be one that errors can name.
func HidesSecret(t *testing.T, err error, input []byte, secret string) {
	t.Helper()
	if err == nil || len(secret) < minSecret || bytes.Count(input, []byte(secret)) != 1 {
		return
	}
	if strings.Contains(err.Error(), secret) {
		t.Errorf("the error contains the secret %q: %v", secret, err)
	}
}
