package attacks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/procfs"

	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/localkube"
)

// hubMemory is the memory limit of the hub in the tests, in bytes. The chart sets the same limit.
const hubMemory = 2 << 30

// hubProcess is a hub in its own process, with its own control plane.
type hubProcess struct {
	plane   *localkube.Plane
	process int
}

// startHub starts a hub whose memory limit is hubMemory. The test fails if the hub ends before the test.
func startHub(t *testing.T) hubProcess {
	t.Helper()
	plane, err := localkube.Start(t.Context(), localkube.Options{Name: "hub"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = plane.Stop() })
	program, err := os.Executable()
	if err := errors.Join(err, hub.InstallCRDs(t.Context(), plane.Config), hub.EnsureAdmissionPolicies(t.Context(), plane.Config)); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "hub.log"))
	if err != nil {
		t.Fatal(err)
	}
	command := exec.CommandContext(context.WithoutCancel(t.Context()), program, "hub", plane.Kubeconfig)
	command.Env = append(os.Environ(), fmt.Sprintf("GOMEMLIMIT=%d", hubMemory))
	command.Stdout, command.Stderr = log, log
	// The hub exits when its standard input is closed, also if this process is killed. The context of the test ends
	// before.
	input, err := command.StdinPipe()
	if err := errors.Join(err, command.Start()); err != nil {
		t.Fatal(err)
	}
	stopping := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		err := command.Wait()
		select {
		case <-stopping:
		default:
			text, _ := os.ReadFile(log.Name()) // only for the message
			t.Errorf("the hub ended: %v\n%s", err, text[max(0, len(text)-4096):])
		}
	}()
	t.Cleanup(func() { close(stopping); _ = input.Close(); <-ended; _ = log.Close() })
	return hubProcess{plane: plane, process: command.Process.Pid}
}

// memory returns the anonymous memory of the hub and of its children, in bytes.
func (h hubProcess) memory() (hubItself, children uint64) {
	processes, err := procfs.AllProcs()
	if err != nil {
		return 0, 0
	}
	for _, process := range processes {
		stat, err := process.Stat()
		// A new process has the memory and the arguments of the hub until it executes its program.
		arguments, _ := process.CmdLine()
		isChild := err == nil && stat.PPID == h.process && slices.Contains(arguments, "sandbox")
		if !isChild && process.PID != h.process {
			continue
		}
		status, err := process.NewStatus()
		switch {
		case err != nil: // it has ended
		case process.PID == h.process:
			hubItself = status.RssAnon
		default:
			children += status.RssAnon
		}
	}
	return hubItself, children
}

// largestMemory samples the memory of the hub and of its children until stop is called. stop returns the maximum of
// the sum, of the hub, and of the children.
func (h hubProcess) largestMemory() (stop func() (all, hubItself, children uint64)) {
	done, result := make(chan struct{}), make(chan [3]uint64)
	go func() {
		var most [3]uint64
		for ticks := time.Tick(20 * time.Millisecond); ; {
			select {
			case <-ticks:
				hubItself, children := h.memory()
				most = [3]uint64{max(most[0], hubItself+children), max(most[1], hubItself), max(most[2], children)}
			case <-done:
				result <- most
				return
			}
		}
	}()
	return func() (all, hubItself, children uint64) {
		close(done)
		most := <-result
		return most[0], most[1], most[2]
	}
}
