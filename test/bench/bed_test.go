package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/procfs"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// waitTimeout bounds every wait.
	waitTimeout = 2 * time.Minute
	// pollInterval is the time between two checks of a wait without a watch.
	pollInterval = 100 * time.Millisecond
	// pauseTime is the pause between two measurements.
	pauseTime = 15 * time.Second
	// settleTime is the idle time of a process before its memory is read: an agent releases unused memory every two
	// minutes.
	settleTime = 150 * time.Second
	// processorWindow is the time over which the use of processors is measured. Linux counts in 10 ms: 0.2 millicores.
	processorWindow = time.Minute
)

// testBench is a hub with Towline, on which benchmarks measure.
type testBench struct {
	*testing.B
	dir   string
	plane *localkube.Plane
	hub   client.Client
}

// newTestBench starts a hub; it is stopped when the benchmark ends.
func newTestBench(b *testing.B) *testBench {
	b.Helper()
	bd := &testBench{B: b, dir: b.TempDir(), plane: localkube.ForTest(b, localkube.Named("hub"))}
	bd.hub = bd.client(bd.plane)
	bd.startHub()
	bd.eventually("the hub registers itself", func(ctx context.Context) error { return bd.wantReady(ctx, "mgmt", "mgmt") })
	return bd
}

func (b *testBench) startHub() {
	b.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(b.Context()), b.binary("towline"), "hub", "--install-crds",
		"--diagnostics-address=127.0.0.1:0", "--health-address=127.0.0.1:0", "--cache-dir="+filepath.Join(b.dir, "cache"))
	cmd.Env = append(os.Environ(), "KUBECONFIG="+b.plane.Kubeconfig)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill() // an error means that it has ended
		_ = cmd.Wait()         // it was killed
		if b.Failed() {
			b.Logf("output of the hub:\n%s", out.String())
		}
	})
}

// startPullMember starts a member and registers it in pull mode, in a namespace with its name.
func (b *testBench) startPullMember(name, labels string) *localkube.Plane {
	b.Helper()
	plane := localkube.ForTest(b, localkube.Named(name), localkube.WithExec(join.DefaultAgentImage, b.binary("towline-agent")))
	manifest := b.run(b.plane, "", "sveltosctl", "register", "cluster", "--namespace="+name, "--cluster="+name, "--pullmode", "--labels="+labels)
	b.run(plane, manifest, "kubectl", "apply", "-f", "-")
	b.eventually(name+" is ready", func(ctx context.Context) error { return b.wantReady(ctx, name, name) })
	return plane
}

// startPushMember starts a member and registers it in push mode, in a namespace with its name.
func (b *testBench) startPushMember(name, labels string) *localkube.Plane {
	b.Helper()
	plane := localkube.ForTest(b, localkube.Named(name))
	b.run(b.plane, "", "kubectl", "create", "namespace", name)
	b.run(b.plane, "", "sveltosctl", "register", "cluster", "--namespace="+name, "--cluster="+name, "--kubeconfig="+plane.Kubeconfig, "--labels="+labels)
	b.eventually(name+" is ready", func(ctx context.Context) error { return b.wantReady(ctx, name, name) })
	return plane
}

func (b *testBench) wantReady(ctx context.Context, namespace, name string) error {
	var cluster libv1beta1.SveltosCluster
	if err := b.hub.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, &cluster); err != nil {
		return err
	}
	if !cluster.Status.Ready {
		return fmt.Errorf("cluster %s/%s is not ready: %s", namespace, name, cluster.Status.FailureMessage)
	}
	return nil
}

func (b *testBench) client(plane *localkube.Plane) client.Client {
	b.Helper()
	c, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		b.Fatal(err)
	}
	return c
}

func (b *testBench) binary(name string) string {
	b.Helper()
	path, err := localkube.Binary(name)
	if err != nil {
		b.Fatal(err)
	}
	return path
}

// run runs one of our programs with KUBECONFIG set to the plane's and returns its standard output.
func (b *testBench) run(plane *localkube.Plane, stdin, binary string, args ...string) string {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), b.binary(binary), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+plane.Kubeconfig)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("%s: %v: %s", strings.Join(cmd.Args, " "), err, stderr.String())
	}
	return string(out)
}

// apply applies a manifest to the hub.
func (b *testBench) apply(manifest string) {
	b.Helper()
	b.run(b.plane, manifest, "kubectl", "apply", "-f", "-")
}

func (b *testBench) eventually(what string, check func(context.Context) error) {
	b.Helper()
	var last error
	err := wait.PollUntilContextTimeout(b.Context(), pollInterval, waitTimeout, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		b.Fatalf("%s: not within %s: %v", what, waitTimeout, last)
	}
}

// residentMemory returns the resident memory of a process in MiB, after settleTime.
func (b *testBench) residentMemory(pid int) float64 {
	b.Helper()
	<-time.After(settleTime)
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		b.Fatal(err)
	}
	_, after, _ := strings.Cut(string(raw), "VmRSS:")
	fields := strings.Fields(after)
	if len(fields) < 2 || fields[1] != "kB" {
		b.Fatalf("the status of process %d has no VmRSS", pid)
	}
	kib, err := strconv.ParseFloat(fields[0], 64)
	if err != nil {
		b.Fatal(err)
	}
	return kib / 1024
}

// millicores returns the processor use of a process over processorWindow, in thousandths of a processor.
func (b *testBench) millicores(pid int) float64 {
	b.Helper()
	began, before := time.Now(), b.processorSeconds(pid)
	<-time.After(processorWindow)
	return (b.processorSeconds(pid) - before) / time.Since(began).Seconds() * 1000
}

// processorSeconds returns the processor time that a process has used.
func (b *testBench) processorSeconds(pid int) float64 {
	b.Helper()
	process, err := procfs.NewProc(pid)
	if err != nil {
		b.Fatal(err)
	}
	stat, err := process.Stat()
	if err != nil {
		b.Fatal(err)
	}
	return stat.CPUTime()
}

// agentPID finds the process of a cluster's agent, which its pod started.
func (b *testBench) agentPID(cluster string) int {
	b.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		b.Fatal(err)
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		// A process that has ended is skipped.
		raw, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
		if slices.Contains(strings.Split(string(raw), "\x00"), "--cluster-name="+cluster) {
			return pid
		}
	}
	b.Fatalf("no agent of %s is running", cluster)
	return 0
}

// watch sends the text of each event of the objects of a kind in a namespace of a plane until the benchmark ends. It
// skips an event whose text is "".
func (b *testBench) watch(out chan<- string, plane *localkube.Plane, list client.ObjectList, namespace string, text func(watch.Event) string) {
	b.Helper()
	watcher, err := client.NewWithWatch(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.Context()))
	events, err := watcher.Watch(ctx, list, client.InNamespace(namespace))
	if err != nil {
		cancel()
		b.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for event := range events.ResultChan() {
			found := text(event)
			if found == "" {
				continue
			}
			select {
			case out <- found:
			case <-ctx.Done():
				return
			}
		}
	}()
	b.Cleanup(func() {
		cancel()
		events.Stop()
		<-ended
	})
}

// reportQuantiles reports the median and the 99th percentile in milliseconds.
func (b *testBench) reportQuantiles(times []time.Duration) {
	slices.Sort(times)
	for _, percent := range []int{50, 99} {
		nearest := times[(len(times)*percent+99)/100-1]
		b.ReportMetric(float64(nearest.Microseconds())/1000, fmt.Sprintf("p%d-ms", percent))
	}
}
