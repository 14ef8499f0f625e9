package stories

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	certificatesv1 "k8s.io/api/certificates/v1"

	"github.com/towline/towline/internal/localkube"
)

// TestKarmadaFaults makes faults at every step of the life of a cluster in pull mode.
func TestKarmadaFaults(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.karmadaMembers("shaky", "dead", "gone")
	shaky, dead, unreachable := planes[0], planes[1], planes[2]
	w.registerMember(unreachable) // it also creates the objects that all clusters share on the hub

	t.Run("register interrupted at each of its lines", func(t *testing.T) { w.forSubtest(t).interruptRegister(shaky) })
	t.Run("the hub killed between request and approval", func(t *testing.T) {
		inner := w.forSubtest(t)
		inner.killHubDuringRegister(w, shaky)
	})
	// The other subtests run in parallel: they affect neither each other nor the hub, and two of them mostly wait.
	for name, part := range map[string]func(*world){
		"the life of a member": func(w *world) {
			w.t.Run("register killed at each of its lines", func(t *testing.T) { w.forSubtest(t).killRegister(shaky) })
			w.t.Run("the agent killed while register waits for it", func(t *testing.T) { w.forSubtest(t).killAgentDuringRegister(shaky) })
			w.t.Run("unregister interrupted half-way", func(t *testing.T) { w.forSubtest(t).interruptUnregister(shaky) })
			w.t.Run("a certificate that has expired", func(t *testing.T) { w.forSubtest(t).startWithExpiredCertificate(shaky) })
		},
		"the agent dead": func(w *world) {
			w.t.Run("unregister", func(t *testing.T) { w.forSubtest(t).unregisterWithDeadAgent(dead) })
			w.t.Run("three rotations of the certificate", func(t *testing.T) { w.forSubtest(t).rotateCertificate(dead) })
			w.t.Run("unjoin with an unreachable member", func(t *testing.T) { w.forSubtest(t).unjoinUnreachableMember(dead) })
		},
		"an unreachable member": func(w *world) { w.deleteUnreachableMember(unreachable) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			part(w.forSubtest(t))
		})
	}
}

// hangTimeout is the time after which a command hangs although it need not wait for a member or an agent.
const hangTimeout = 75 * time.Second

// registerLines are the lines that register prints for its steps.
func registerLines() []string {
	return slices.DeleteFunc(strings.Split(registerOutput, "\n"), func(line string) bool { return !strings.HasPrefix(line, "[") })
}

// signalAtLine runs a register command and sends it a signal as soon as it has printed a line.
func (w *world) signalAtLine(plane *localkube.Plane, command, line string, signal syscall.Signal) error {
	w.t.Helper()
	cmd := w.shellCommand(plane, command)
	var stdout, stderr lockedBuffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for sent := false; ; {
		select {
		case err := <-ended:
			if err != nil {
				err = fmt.Errorf("%w: %s", err, stderr.String())
			}
			return err
		case <-look.C:
			if !sent && strings.Contains(stdout.String(), line+"\n") {
				sent = true
				_ = cmd.Process.Signal(signal) // an error means that it has ended
			}
		}
	}
}

// interruptRegister sends SIGINT at each line. Each time the hub and the member are unchanged, and at last the command
// succeeds with the same token.
func (w *world) interruptRegister(plane *localkube.Plane) {
	w.t.Helper()
	line := w.createTokenCommand()
	hub, member := w.awaitStable(w.hub), w.awaitStable(plane)
	for _, stage := range registerLines() {
		err := w.signalAtLine(plane, line, stage, syscall.SIGINT)
		exit := &exec.ExitError{}
		if !errors.As(err, &exit) || exit.ExitCode() != 130 {
			w.t.Errorf("interrupted at %q: got %v, want exit code 130", stage, err)
		}
		w.wantUnchanged("an interruption at "+stage, w.hub, hub)
		w.wantUnchanged("an interruption at "+stage, plane, member)
	}
	w.runShell(plane, line)
	w.awaitClusterReady(plane.Name, "Pull")
	w.unregisterCompletely(plane)
}

// killRegister kills the command at each line. The next attempt with the same token succeeds.
func (w *world) killRegister(plane *localkube.Plane) {
	w.t.Helper()
	for _, stage := range registerLines() {
		line := w.createTokenCommand()
		if err := w.signalAtLine(plane, line, stage, syscall.SIGKILL); err == nil {
			w.t.Errorf("register was not killed at %q", stage)
		}
		if out, err := output(w.shellCommand(plane, line)); err != nil {
			w.t.Fatalf("register after a kill at %q: %v\n%s", stage, err, out)
		}
		w.awaitClusterReady(plane.Name, "Pull")
		w.unregisterCompletely(plane)
	}
}

// unregisterCompletely unregisters a member, and checks that no object is left.
func (w *world) unregisterCompletely(plane *localkube.Plane) {
	w.t.Helper()
	w.runShell(plane, w.unregister(plane))
	w.wantRemoved(plane)
}

func (w *world) unregister(plane *localkube.Plane) string {
	return fmt.Sprintf("karmadactl unregister %s --cluster-kubeconfig=%s --karmada-config=%s", plane.Name, plane.Kubeconfig, w.hub.Kubeconfig)
}

// killAgentDuringRegister kills the agent as soon as it runs, while register waits for it. The Deployment starts it
// again, and register succeeds.
func (w *world) killAgentDuringRegister(plane *localkube.Plane) {
	w.t.Helper()
	cmd := w.shellCommand(plane, w.createTokenCommand())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("the agent runs", func() error { return w.killAgent(plane) })
	if err := cmd.Wait(); err != nil {
		w.t.Fatalf("register, whose agent was killed once: %v\n%s", err, out.String())
	}
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Error(err)
	}
	w.unregisterCompletely(plane)
}

// killAgent kills the process of the agent's container with SIGKILL. It is a process of this story: localkube runs
// containers as processes, with the port of their control plane in the environment.
func (w *world) killAgent(plane *localkube.Plane) error {
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, command := range commands {
		args, _ := os.ReadFile(command) // a process may have ended
		environment, _ := os.ReadFile(filepath.Join(filepath.Dir(command), "environ"))
		ours := bytes.Contains(append([]byte{0}, environment...), fmt.Appendf(nil, "\x00KUBERNETES_SERVICE_PORT=%d\x00", plane.Port()))
		if !ours || !bytes.HasPrefix(args, []byte("/bin/karmada-agent\x00")) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(command, "/proc/%d/", &pid); err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGKILL)
	}
	return errors.New("no agent runs")
}

// killHubDuringRegister kills the hub before it has approved the request, and starts it again.
func (w *world) killHubDuringRegister(outer *world, plane *localkube.Plane) {
	w.t.Helper()
	line := w.createTokenCommand()
	outer.hubProcess.kill()
	cmd := w.shellCommand(plane, line)
	var out lockedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("register requests a certificate", func() error {
		requests := &certificatesv1.CertificateSigningRequestList{}
		if err := w.client(w.hub).List(w.t.Context(), requests); err != nil {
			return err
		}
		for _, request := range requests.Items {
			if strings.HasPrefix(request.Name, plane.Name+"-") && len(request.Status.Conditions) == 0 {
				return nil
			}
		}
		return errors.New("no request for a certificate exists")
	})
	outer.startHub()
	if err := cmd.Wait(); err != nil {
		w.t.Fatalf("register, with a restarted hub: %v\n%s", err, out.String())
	}
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Error(err)
	}
	w.unregisterCompletely(plane)
}

// unregisterWithDeadAgent unregisters a member whose agent is stopped. The command ends within hangTimeout, and only
// the propagated object stays on the member.
func (w *world) unregisterWithDeadAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.registerMember(plane)
	w.propagateWork(plane, "stays")
	w.stopAgent(plane)
	began := time.Now()
	w.runShell(plane, w.unregister(plane))
	took := time.Since(began)
	w.t.Logf("unregister of a member without an agent took %s", took.Round(time.Millisecond))
	if took > hangTimeout {
		w.t.Errorf("unregister took %s, want at most %s", took, hangTimeout)
	}
	w.wantNoCluster(plane.Name)
	w.awaitDeployed(plane)
	// The object stays, and so does its record: only the agent may decide about it.
	w.kubectl(plane, "delete", "configmap", "delivered")
	w.kubectl(plane, "delete", "namespace", "karmada-cluster")
	w.wantCleanMember(plane)
}

// interruptUnregister sends SIGINT while the hub waits for the agent, and unregisters again.
func (w *world) interruptUnregister(plane *localkube.Plane) {
	w.t.Helper()
	w.registerMember(plane)
	w.propagateWork(plane, "goes")
	w.stopAgent(plane)
	cut := w.start("unregister", plane, "karmadactl", strings.Fields(w.unregister(plane))[1:]...)
	w.eventually("the removal has begun", func() error {
		cluster, err := w.readCluster(plane.Name)
		if err == nil && cluster.DeletionTimestamp.IsZero() {
			err = errors.New("the Cluster is not being deleted")
		}
		return err
	})
	_ = cut.cmd.Process.Signal(os.Interrupt) // an error means that it has ended, and the exit code is checked below
	<-cut.exited
	if code := cut.cmd.ProcessState.ExitCode(); code != 130 {
		w.t.Errorf("an interrupted unregister exits with %d, want 130", code)
	}
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	w.runShell(plane, w.unregister(plane))
	if err := w.wantMissing(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		w.t.Error(err)
	}
	w.wantRemoved(plane)
}

// rotateCertificate waits until an agent has renewed its certificate three times. It is valid for ten minutes, the
// minimum of Kubernetes. The signer dates it back by five minutes, and the agent renews it after a third of that total.
func (w *world) rotateCertificate(plane *localkube.Plane) {
	w.t.Helper()
	w.registerMember(plane, "--cert-expiration-seconds=600")
	agent := w.startLinkedAgent(plane, "--cert-rotation-remaining-time-threshold=0.66", "--cert-rotation-checking-interval=1s")
	w.eventually("three certificates have expired after their renewal", func() error {
		if used, expired := agent.link.certificateCounts(); expired < 3 {
			return fmt.Errorf("there have been %d certificates, and %d have expired", used, expired)
		}
		return nil
	})
	w.propagateWork(plane, "with a new certificate")
	w.awaitClusterReady(plane.Name, "Pull")
	if failed := agent.link.listFailures(); len(failed) > 0 {
		w.t.Errorf("requests of the agent failed: %q", failed)
	}
	select {
	case <-agent.exited:
		w.t.Error("the agent was started again")
	default:
	}
	agent.stop()
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	w.unregisterCompletely(plane)
}

// startWithExpiredCertificate starts an agent with a certificate that has expired. The log of the agent names the
// command that repairs it.
func (w *world) startWithExpiredCertificate(plane *localkube.Plane) {
	w.t.Helper()
	w.registerMember(plane)
	w.propagateWork(plane, "before")
	_, kubeconfig := w.agentConfig(plane)
	w.stopAgent(plane)
	secret := &corev1.Secret{}
	c := w.client(plane)
	if err := c.Get(w.t.Context(), client.ObjectKey{Namespace: agentSpace, Name: agentSecret}, secret); err != nil {
		w.t.Fatal(err)
	}
	secret.Data[agentSecret] = w.expireCertificate(kubeconfig)
	if err := c.Update(w.t.Context(), secret); err != nil {
		w.t.Fatal(err)
	}
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	advice := regexp.MustCompile(`karmadactl token create --cluster-name=` + plane.Name + ` --print-register-command`)
	w.eventually("the agent logs the command", func() error {
		logs, err := filepath.Glob(filepath.Join(plane.Dir, "pods", agentSpace+"_karmada-agent-*.log"))
		for _, log := range logs {
			if text, _ := os.ReadFile(log); advice.Match(text) {
				return nil
			}
		}
		return fmt.Errorf("the logs %q do not name it: %w", logs, errors.Join(err, errors.New("no advice")))
	})
	line := strings.TrimSpace(w.runShell(w.hub, fmt.Sprintf("karmadactl token create --cluster-name=%s --print-register-command", plane.Name)))
	if !strings.HasSuffix(line, " --cluster-name "+plane.Name+" --renew") {
		w.t.Errorf("token create printed %q", line)
	}
	w.runShell(plane, line)
	w.propagateWork(plane, "with another certificate")
	w.awaitClusterReady(plane.Name, "Pull")
	w.unregisterCompletely(plane)
}

// unjoinUnreachableMember unjoins a cluster in push mode that does not answer.
func (w *world) unjoinUnreachableMember(plane *localkube.Plane) {
	w.t.Helper()
	w.joinMember(plane)
	w.propagateWork(plane, "lost")
	if err := plane.Kill(); err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	w.runShell(w.hub, "karmadactl unjoin "+plane.Name)
	took := time.Since(began)
	w.t.Logf("unjoin of an unreachable member took %s", took.Round(time.Millisecond))
	if took > hangTimeout {
		w.t.Errorf("unjoin took %s, want at most %s", took, hangTimeout)
	}
	w.wantNoCluster(plane.Name)
}

// deleteUnreachableMember deletes a Cluster whose member does not answer. unregister, which needs the member, fails
// before hangTimeout.
func (w *world) deleteUnreachableMember(plane *localkube.Plane) {
	w.t.Helper()
	w.propagateWork(plane, "lost")
	if err := plane.Kill(); err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	_, err := output(w.shellCommand(w.hub, w.unregister(plane)))
	if took := time.Since(began); took > hangTimeout {
		w.t.Errorf("unregister took %s, want at most %s", took, hangTimeout)
	}
	wantExit(w.t, err, 1, plane.Config.Host, "kubectl delete cluster "+plane.Name)
	w.t.Logf("unregister of an unreachable member: %v after %s", err, time.Since(began).Round(time.Millisecond))
	w.kubectl(w.hub, "delete", "cluster", plane.Name, "--ignore-not-found", "--timeout=90s")
	w.wantNoCluster(plane.Name)
}
