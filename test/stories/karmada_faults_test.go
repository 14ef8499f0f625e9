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

// TestKarmadaFaults lets things go wrong at every moment of a cluster's life in pull mode.
func TestKarmadaFaults(t *testing.T) {
	awaitTurn(t)
	w := newWorld(t)
	planes := w.karmadaMembers("shaky", "dead", "gone")
	shaky, dead, gone := planes[0], planes[1], planes[2]
	w.registers(gone) // and with it what all clusters share on the hub

	t.Run("register interrupted at each of its lines", func(t *testing.T) { w.in(t).interruptedRegister(shaky) })
	t.Run("the hub killed between request and approval", func(t *testing.T) {
		inner := w.in(t)
		inner.killedHub(w, shaky)
	})
	// The others mind neither each other nor the hub; two of them mostly wait.
	for name, part := range map[string]func(*world){
		"the life of a member": func(w *world) {
			w.t.Run("register killed at each of its lines", func(t *testing.T) { w.in(t).killedRegister(shaky) })
			w.t.Run("the agent killed while it is waited for", func(t *testing.T) { w.in(t).killedAgent(shaky) })
			w.t.Run("unregister interrupted half-way", func(t *testing.T) { w.in(t).interruptedUnregister(shaky) })
			w.t.Run("a certificate that has expired", func(t *testing.T) { w.in(t).expiredCertificate(shaky) })
		},
		"the agent dead": func(w *world) {
			w.t.Run("unregister", func(t *testing.T) { w.in(t).deadAgent(dead) })
			w.t.Run("three rotations of the certificate", func(t *testing.T) { w.in(t).rotations(dead) })
			w.t.Run("unjoin with the member gone", func(t *testing.T) { w.in(t).joinedMemberGone(dead) })
		},
		"the member gone": func(w *world) { w.memberGone(gone) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			part(w.in(t))
		})
	}
}

// forever is when a command hangs that nothing but a member or an agent keeps waiting.
const forever = 75 * time.Second

// stages are the lines of register at which something can happen.
func stages() []string {
	return slices.DeleteFunc(strings.Split(registerOutput, "\n"), func(line string) bool { return !strings.HasPrefix(line, "[") })
}

// until runs a register command and sends it a signal as soon as it has printed a line.
func (w *world) until(plane *localkube.Plane, command, line string, signal syscall.Signal) error {
	w.t.Helper()
	cmd := w.types(plane, command)
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

// interruptedRegister presses Ctrl-C at each line. Each time both sides are as they were, and in the end it works with
// the same token.
func (w *world) interruptedRegister(plane *localkube.Plane) {
	w.t.Helper()
	line := w.token()
	hub, member := w.settled(w.hub), w.settled(plane)
	for _, stage := range stages() {
		err := w.until(plane, line, stage, syscall.SIGINT)
		exit := &exec.ExitError{}
		if !errors.As(err, &exit) || exit.ExitCode() != 130 {
			w.t.Errorf("interrupted at %q: got %v, want exit code 130", stage, err)
		}
		w.wantUnchanged("an interruption at "+stage, w.hub, hub)
		w.wantUnchanged("an interruption at "+stage, plane, member)
	}
	w.typed(plane, line)
	w.clusterReady(plane.Name, "Pull")
	w.unregisters(plane)
}

// killedRegister kills the command at each line. What it leaves does not keep the next attempt from working, with the
// same token.
func (w *world) killedRegister(plane *localkube.Plane) {
	w.t.Helper()
	for _, stage := range stages() {
		line := w.token()
		if err := w.until(plane, line, stage, syscall.SIGKILL); err == nil {
			w.t.Errorf("register was not killed at %q", stage)
		}
		if out, err := output(w.types(plane, line)); err != nil {
			w.t.Fatalf("register, after one that was killed at %q: %v\n%s", stage, err, out)
		}
		w.clusterReady(plane.Name, "Pull")
		w.unregisters(plane)
	}
}

// unregisters takes a member out of the fleet, and checks that nothing is left.
func (w *world) unregisters(plane *localkube.Plane) {
	w.t.Helper()
	w.typed(plane, w.unregister(plane))
	w.wantLeft(plane)
}

func (w *world) unregister(plane *localkube.Plane) string {
	return fmt.Sprintf("karmadactl unregister %s --cluster-kubeconfig=%s --karmada-config=%s", plane.Name, plane.Kubeconfig, w.hub.Kubeconfig)
}

// killedAgent kills the agent as soon as it runs, while register waits for it. The Deployment starts it again, and
// register ends well.
func (w *world) killedAgent(plane *localkube.Plane) {
	w.t.Helper()
	cmd := w.types(plane, w.token())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("there is an agent to kill", func() error { return w.killAgent(plane) })
	if err := cmd.Wait(); err != nil {
		w.t.Fatalf("register, whose agent was killed once: %v\n%s", err, out.String())
	}
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Error(err)
	}
	w.unregisters(plane)
}

// killAgent kills the process of the agent's container with SIGKILL. It is a process of this story: localkube runs
// containers as processes, with the port of their control plane in the environment.
func (w *world) killAgent(plane *localkube.Plane) error {
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, command := range commands {
		args, _ := os.ReadFile(command) // many end while we look
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
	return errors.New("there is none")
}

// killedHub kills the hub before it has approved the request, and starts it again.
func (w *world) killedHub(outer *world, plane *localkube.Plane) {
	w.t.Helper()
	line := w.token()
	outer.hubOS.kill()
	cmd := w.types(plane, line)
	var out lockedBuffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.eventually("register asks for a certificate", func() error {
		requests := &certificatesv1.CertificateSigningRequestList{}
		if err := w.client(w.hub).List(w.t.Context(), requests); err != nil {
			return err
		}
		for _, request := range requests.Items {
			if strings.HasPrefix(request.Name, plane.Name+"-") && len(request.Status.Conditions) == 0 {
				return nil
			}
		}
		return errors.New("there is no request")
	})
	outer.startHub()
	if err := cmd.Wait(); err != nil {
		w.t.Fatalf("register, with a hub that was away: %v\n%s", err, out.String())
	}
	if err := w.wantCluster(plane.Name, "Pull", "True"); err != nil {
		w.t.Error(err)
	}
	w.unregisters(plane)
}

// deadAgent unregisters a member whose agent is dead. It ends before long, and only what was propagated stays on the
// member.
func (w *world) deadAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.registers(plane)
	w.sends(plane, "stays")
	w.stopAgent(plane)
	began := time.Now()
	w.typed(plane, w.unregister(plane))
	took := time.Since(began)
	w.t.Logf("unregistering a member whose agent is dead took %s", took.Round(time.Millisecond))
	if took > forever {
		w.t.Errorf("unregister took %s", took)
	}
	w.wantNoCluster(plane.Name)
	w.has(plane)
	// It stays, and so does the agent's record of it, which nobody but the agent may judge.
	w.kubectl(plane, "delete", "configmap", "delivered")
	w.kubectl(plane, "delete", "namespace", "karmada-cluster")
	w.wantBare(plane)
}

// interruptedUnregister presses Ctrl-C while the hub waits for the agent, and unregisters again.
func (w *world) interruptedUnregister(plane *localkube.Plane) {
	w.t.Helper()
	w.registers(plane)
	w.sends(plane, "goes")
	w.stopAgent(plane)
	cut := w.start("unregister", plane, "karmadactl", strings.Fields(w.unregister(plane))[1:]...)
	w.eventually("the removal is under way", func() error {
		cluster, err := w.cluster(plane.Name)
		if err == nil && cluster.DeletionTimestamp.IsZero() {
			err = errors.New("the Cluster is not being deleted")
		}
		return err
	})
	_ = cut.cmd.Process.Signal(os.Interrupt) // an error means that it has ended, which is judged below
	<-cut.exited
	if code := cut.cmd.ProcessState.ExitCode(); code != 130 {
		w.t.Errorf("an interrupted unregister exits with %d, want 130", code)
	}
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	w.typed(plane, w.unregister(plane))
	if err := w.absent(plane, &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		w.t.Error(err)
	}
	w.wantLeft(plane)
}

// rotations lets an agent renew its certificate three times. It lives for ten minutes, the least that Kubernetes gives,
// and is renewed as soon as a third of what the signer writes into it is over, which is dated back by five minutes.
func (w *world) rotations(plane *localkube.Plane) {
	w.t.Helper()
	w.registers(plane, "--cert-expiration-seconds=600")
	agent := w.freeAgent(plane, "--cert-rotation-remaining-time-threshold=0.66", "--cert-rotation-checking-interval=1s")
	w.eventually("three new certificates have been in use, and those before the last have expired", func() error {
		if used, expired := agent.link.certificates(); expired < 3 {
			return fmt.Errorf("there have been %d certificates, and %d have expired", used, expired)
		}
		return nil
	})
	w.sends(plane, "with a new certificate")
	w.clusterReady(plane.Name, "Pull")
	if failed := agent.link.failures(); len(failed) > 0 {
		w.t.Errorf("requests of the agent failed: %q", failed)
	}
	select {
	case <-agent.exited:
		w.t.Error("the agent was started again")
	default:
	}
	agent.stop()
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	w.unregisters(plane)
}

// expiredCertificate lets an agent start with a certificate that has expired. It says what to run, and that helps.
func (w *world) expiredCertificate(plane *localkube.Plane) {
	w.t.Helper()
	w.registers(plane)
	w.sends(plane, "before")
	_, kubeconfig := w.agentConfig(plane)
	w.stopAgent(plane)
	secret := &corev1.Secret{}
	c := w.client(plane)
	if err := c.Get(w.t.Context(), client.ObjectKey{Namespace: agentSpace, Name: agentSecret}, secret); err != nil {
		w.t.Fatal(err)
	}
	secret.Data[agentSecret] = w.expire(kubeconfig)
	if err := c.Update(w.t.Context(), secret); err != nil {
		w.t.Fatal(err)
	}
	w.kubectl(plane, "scale", "deployment", "karmada-agent", "-n", agentSpace, "--replicas=1")
	advice := regexp.MustCompile(`karmadactl token create --cluster-name=` + plane.Name + ` --print-register-command`)
	w.eventually("the agent says what to run", func() error {
		logs, err := filepath.Glob(filepath.Join(plane.Dir, "pods", agentSpace+"_karmada-agent-*.log"))
		for _, log := range logs {
			if text, _ := os.ReadFile(log); advice.Match(text) {
				return nil
			}
		}
		return fmt.Errorf("none of %q does (%w)", logs, errors.Join(err, errors.New("no advice")))
	})
	line := strings.TrimSpace(w.typed(w.hub, fmt.Sprintf("karmadactl token create --cluster-name=%s --print-register-command", plane.Name)))
	if !strings.HasSuffix(line, " --cluster-name "+plane.Name+" --renew") {
		w.t.Errorf("token create printed %q", line)
	}
	w.typed(plane, line)
	w.sends(plane, "with another certificate")
	w.clusterReady(plane.Name, "Pull")
	w.unregisters(plane)
}

// joinedMemberGone takes out a cluster that the hub dials, when nobody answers there any more.
func (w *world) joinedMemberGone(plane *localkube.Plane) {
	w.t.Helper()
	w.joins(plane)
	w.sends(plane, "lost")
	if err := plane.Kill(); err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	w.typed(w.hub, "karmadactl unjoin "+plane.Name)
	took := time.Since(began)
	w.t.Logf("unjoining a member that is gone took %s", took.Round(time.Millisecond))
	if took > forever {
		w.t.Errorf("unjoin took %s", took)
	}
	w.wantNoCluster(plane.Name)
}

// memberGone deletes a Cluster whose member is gone. The command that needs the member says so, and does not hang.
func (w *world) memberGone(plane *localkube.Plane) {
	w.t.Helper()
	w.sends(plane, "lost")
	if err := plane.Kill(); err != nil {
		w.t.Fatal(err)
	}
	began := time.Now()
	_, err := output(w.types(w.hub, w.unregister(plane)))
	if took := time.Since(began); took > forever {
		w.t.Errorf("unregister took %s", took)
	}
	exits(w.t, err, 1, plane.Config.Host, "kubectl delete cluster "+plane.Name)
	w.t.Logf("unregistering a member that is gone: %v after %s", err, time.Since(began).Round(time.Millisecond))
	w.kubectl(w.hub, "delete", "cluster", plane.Name, "--ignore-not-found", "--timeout=90s")
	w.wantNoCluster(plane.Name)
}
