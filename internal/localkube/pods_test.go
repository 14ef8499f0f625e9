package localkube_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/localkube"
)

const podImage = "localkube.test/pod:v1"

// podPlane returns a control plane that runs this test binary for pods of podImage.
func podPlane(t testing.TB) *localkube.Plane {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return localkube.ForTest(t, localkube.WithExec(podImage, self))
}

// processPod is a pod that runs this test binary.
func processPod(name string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: podImage, Command: []string{"/replaced"}, Args: args,
			Env: []corev1.EnvVar{
				{Name: roleVariable, Value: "pod"},
				{Name: "POD", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
				{Name: "NODE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "spec.nodeName"}}},
				{Name: "MEMORY", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.memory"}}},
				{Name: "BOTH", Value: "$(POD) on $(NODE)"},
			},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}},
		}}},
	}
}

func TestPodOfExecImageIsAProcess(t *testing.T) {
	t.Parallel()
	p := podPlane(t)
	pods := clientOf(p).CoreV1().Pods("default")
	if _, err := pods.Create(t.Context(), processPod("one", "first", "$(POD)"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	report := awaitReports(t, p.Dir, "default_one_main.log", 1)[0]
	eventually(t, "pod is ready", func(ctx context.Context) (bool, string) {
		pod, err := pods.Get(ctx, "one", metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		return isReady(pod), string(pod.Status.Phase)
	})
	if diff := cmp.Diff([]string{"first", "one"}, report.Args); diff != "" {
		t.Errorf("arguments (-want +got):\n%s", diff)
	}
	want := map[string]string{"POD": "one", "NODE": "local", "MEMORY": "67108864", "BOTH": "one on local", "KUBECONFIG": ""}
	for name, value := range want {
		if report.Env[name] != value {
			t.Errorf("variable %s: got %q, want %q", name, report.Env[name], value)
		}
	}
	if want := "system:serviceaccount:default:default"; report.User != want {
		t.Errorf("user that the pod's token names: got %q, want %q", report.User, want)
	}

	if err := pods.Delete(t.Context(), "one", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "pod is deleted", func(ctx context.Context) (bool, string) {
		_, err := pods.Get(ctx, "one", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
	if isAlive(report.PID) {
		t.Errorf("process %d outlives its pod", report.PID)
	}
	if log := readLog(t, p.Dir, "default_one_main.log"); !strings.Contains(log, "asked to end") {
		t.Errorf("process was not asked to end; its log:\n%s", log)
	}
}

func TestEndedProcessIsRestarted(t *testing.T) {
	t.Parallel()
	p := podPlane(t)
	pods := clientOf(p).CoreV1().Pods("default")
	always, never := processPod("always"), processPod("never", "crash")
	never.Spec.RestartPolicy = corev1.RestartPolicyNever
	never.Spec.AutomountServiceAccountToken = ptr.To(false)
	for _, pod := range []*corev1.Pod{always, never} {
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	first := awaitReports(t, p.Dir, "default_always_main.log", 1)[0]
	if err := syscall.Kill(first.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitReports(t, p.Dir, "default_always_main.log", 2)
	eventually(t, "killed process runs again", func(ctx context.Context) (bool, string) {
		pod, err := pods.Get(ctx, "always", metav1.GetOptions{})
		if err != nil || len(pod.Status.ContainerStatuses) == 0 {
			return false, fmt.Sprint(err)
		}
		status := pod.Status.ContainerStatuses[0]
		last := status.LastTerminationState.Terminated
		return isReady(pod) && status.RestartCount == 1 && last != nil && last.ExitCode == 137, fmt.Sprintf("%+v", status)
	})
	eventually(t, "pod that may not restart failed", func(ctx context.Context) (bool, string) {
		pod, err := pods.Get(ctx, "never", metav1.GetOptions{})
		if err != nil || len(pod.Status.ContainerStatuses) == 0 {
			return false, fmt.Sprint(err)
		}
		ended := pod.Status.ContainerStatuses[0].State.Terminated
		return pod.Status.Phase == corev1.PodFailed && ended != nil && ended.ExitCode == 2, fmt.Sprintf("%+v", pod.Status)
	})
	reports := awaitReports(t, p.Dir, "default_never_main.log", 1)
	if got := reports[0].Env["TOWLINE_SERVICEACCOUNT_DIR"]; got != "" {
		t.Errorf("pod that wants no token got one in %s", got)
	}
}

// failedTest is a test that has failed. It keeps its log and its errors.
type failedTest struct {
	*testing.T
	cleanups []func()
	log      strings.Builder
}

func (f *failedTest) Failed() bool                    { return true }
func (f *failedTest) Cleanup(do func())               { f.cleanups = append(f.cleanups, do) }
func (f *failedTest) Logf(format string, args ...any) { fmt.Fprintf(&f.log, format+"\n", args...) }
func (f *failedTest) Error(args ...any)               { fmt.Fprintln(&f.log, args...) }

func TestFailedTestTellsOfItsPlane(t *testing.T) {
	t.Parallel()
	failed := &failedTest{T: t}
	p := podPlane(failed)
	pods := clientOf(p).CoreV1().Pods("default")
	if _, err := pods.Create(t.Context(), processPod("one", "told"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	report := awaitReports(t, p.Dir, "default_one_main.log", 1)[0]
	parent := parentOf(t, report.PID)
	if err := syscall.Kill(parent, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	awaitExit(t, parent)
	for _, do := range failed.cleanups {
		do()
	}
	for _, text := range []string{"control plane local ended by itself", "output of default_one_main of control plane local:", `"told"`} {
		if log := failed.log.String(); !strings.Contains(log, text) {
			t.Errorf("the log of the test is %q, want %q in it", log, text)
		}
	}
}

// parentOf returns the parent of a process: the control plane, for a process of a pod.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, fields, _ := strings.Cut(string(text), ") ")
	var (
		state  string
		parent int
	)
	if _, err := fmt.Sscan(fields, &state, &parent); err != nil {
		t.Fatal(err)
	}
	return parent
}

func TestProcessesDieWithTheirPlane(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*localkube.Plane) error{
		"stopped": (*localkube.Plane).Stop,
		"killed":  (*localkube.Plane).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := podPlane(t)
			if _, err := clientOf(p).CoreV1().Pods("default").Create(t.Context(), processPod("one"), metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			report := awaitReports(t, p.Dir, "default_one_main.log", 1)[0]
			if err := end(p); err != nil {
				t.Fatal(err)
			}
			awaitExit(t, report.PID)
			if err := p.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			awaitReports(t, p.Dir, "default_one_main.log", 2)
		})
	}
}

func TestKilledParentLeavesNothing(t *testing.T) {
	t.Parallel()
	t.Run("in its own network", func(t *testing.T) {
		t.Parallel()
		killParent(t, "")
	})
	t.Run("in another network", func(t *testing.T) {
		t.Parallel()
		killParent(t, localkube.NetworkForTest(t))
	})
}

func killParent(t *testing.T, network localkube.Network) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.CommandContext(t.Context(), self)
	parent.Env = append(os.Environ(), roleVariable+"=parent", networkVariable+"="+string(network))
	parent.Stderr = os.Stderr
	stdout, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	var plane parentReport
	if err := json.NewDecoder(stdout).Decode(&plane); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.BuildConfigFromFlags("", plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.Dial = network.Dial
	pods := kubernetes.NewForConfigOrDie(config).CoreV1().Pods("default")
	if _, err := pods.Create(t.Context(), processPod("one"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	report := awaitReports(t, plane.Dir, "default_one_main.log", 1)[0]

	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed
	awaitExit(t, report.PID)
	eventually(t, "port and directory are free", func(context.Context) (bool, string) {
		_, err := os.Stat(plane.Dir)
		conn, dialErr := network.Dial(t.Context(), "tcp", fmt.Sprintf("127.0.0.1:%d", plane.Port))
		if dialErr == nil {
			_ = conn.Close()
		}
		return dialErr != nil && os.IsNotExist(err), fmt.Sprint(err)
	})
}

// awaitReports waits until the processes of a container have printed n reports, one each.
func awaitReports(t *testing.T, dir, log string, n int) []podReport {
	t.Helper()
	var reports []podReport
	eventually(t, fmt.Sprintf("%d reports in %s", n, log), func(context.Context) (bool, string) {
		reports = nil
		text := readLog(t, dir, log)
		for line := range strings.Lines(text) {
			var report podReport
			if json.Unmarshal([]byte(line), &report) == nil {
				reports = append(reports, report)
			}
		}
		return len(reports) >= n, text
	})
	return reports
}

func readLog(t *testing.T, dir, log string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "pods", log))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return string(text)
}

func awaitExit(t *testing.T, pid int) {
	t.Helper()
	eventually(t, fmt.Sprintf("process %d has ended", pid), func(context.Context) (bool, string) {
		return !isAlive(pid), "it runs"
	})
}

// isAlive returns true if a process runs. A zombie does not count.
func isAlive(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(text), ") ")
	return !strings.HasPrefix(state, "Z")
}

func isReady(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}
