package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// clockTicks is the number of ticks per second in /proc/<pid>/stat. Linux reports 100 to all programs.
const clockTicks = 100

// testHub is a control plane with a hub process.
type testHub struct {
	plane  *localkube.Plane
	client client.WithWatch
	etcd   *etcd
	dir    string
	hub    *exec.Cmd
	// entries is the most objects that a ClusterConfiguration lists.
	entries int
	// diagnosticsAddress is where each process of the hub serves its metrics and profiles.
	diagnosticsAddress string
}

// startHub starts the control plane and the hub. The caller calls stop.
func startHub(ctx context.Context, dir string) (*testHub, error) {
	plane, err := localkube.Start(ctx, localkube.Options{Name: "hub", Dir: filepath.Join(dir, "plane")})
	if err != nil {
		return nil, err
	}
	h := &testHub{plane: plane, etcd: newEtcd(plane.Dir), dir: dir}
	if h.client, err = client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()}); err != nil {
		h.stop()
		return nil, err
	}
	if h.diagnosticsAddress, err = freeAddress(ctx); err != nil {
		h.stop()
		return nil, err
	}
	if err := h.startProcess(); err != nil {
		h.stop()
		return nil, err
	}
	return h, nil
}

// startProcess starts the hub process.
func (h *testHub) startProcess() error {
	binary, err := localkube.Binary("towline")
	if err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(h.dir, "hub.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close() //nolint:errcheck // the process has its own descriptor
	arguments := []string{
		"hub", "--install-crds", "--diagnostics-address=" + h.diagnosticsAddress, "--health-address=127.0.0.1:0", "--cache-dir=" + filepath.Join(h.dir, "cache"),
	}
	h.hub = exec.Command(binary, arguments...) //nolint:noctx // stop ends it
	h.hub.Env = append(os.Environ(), "KUBECONFIG="+h.plane.Kubeconfig)
	h.hub.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	h.hub.Stdout, h.hub.Stderr = log, log
	return h.hub.Start()
}

// kill ends the hub process with SIGKILL.
func (h *testHub) kill() {
	_ = h.hub.Process.Kill() // an error means that it has ended
	_ = h.hub.Wait()         // it was killed
}

func (h *testHub) stop() {
	if h.hub != nil {
		h.kill()
	}
	_ = h.plane.Stop() // the process that is measured ends now
}

// usage is the use of resources up to a moment.
type usage struct {
	at       time.Time
	hubCPU   float64
	planeCPU float64
	requests localkube.RequestCounts
}

// measure reads the present usage.
func (h *testHub) measure(ctx context.Context) (usage, error) {
	requests, err := h.plane.CountRequests(ctx)
	if err != nil {
		return usage{}, err
	}
	return usage{at: time.Now(), hubCPU: cpuSeconds(h.hub.Process.Pid), planeCPU: cpuSeconds(h.planePID()), requests: requests}, nil
}

// planePID returns the process ID of the control plane, 0 if it is not found.
func (h *testHub) planePID() int {
	matches, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, match := range matches {
		raw, _ := os.ReadFile(match) // processes end at any time
		if strings.Contains(string(raw), h.plane.Dir) && strings.Contains(string(raw), "localkube") {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(match)))
			return pid
		}
	}
	return 0
}

// cpuSeconds returns the processor time of a process, 0 if it has ended.
func cpuSeconds(pid int) float64 {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // a process that has ended has no file
	_, after, _ := strings.Cut(string(raw), ") ")
	fields := strings.Fields(after)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseFloat(fields[11], 64)   // the kernel writes numbers
	system, _ := strconv.ParseFloat(fields[12], 64) // the kernel writes numbers
	return (user + system) / clockTicks
}

// residentMiB returns the resident memory of a process in MiB: the present one, and the most since its start. Both are
// 0 if it has ended.
func residentMiB(pid int) (present, most float64) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // a process that has ended has no file
	field := func(name string) float64 {
		match := regexp.MustCompile(name + `:\s+(\d+) kB`).FindStringSubmatch(string(raw))
		if match == nil {
			return 0
		}
		kib, _ := strconv.ParseFloat(match[1], 64) // the pattern matches digits
		return kib / 1024
	}
	return field("VmRSS"), field("VmHWM")
}

// isHeartbeat returns whether a request is a heartbeat.
func isHeartbeat(r localkube.Request) bool { return r.Resource == "leases" }
