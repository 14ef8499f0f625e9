package node

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

const (
	// A process that ends is started again after firstBackoff, and after twice as long each time up to maxBackoff,
	// until it has run for steadyAfter. A kubelet is far more patient.
	firstBackoff = 250 * time.Millisecond
	maxBackoff   = 5 * time.Second
	steadyAfter  = 10 * time.Second
)

// startFailure is the exit code that is reported for a process that could not be started, as a kubelet does.
const startFailure = 128

// container is one container of a pod.
type container struct {
	pod  *pod
	spec *corev1.Container
	// program is what to run for the container; none means that nothing runs and the container is only reported as running.
	program string

	// The pod's mutex guards these. ended says that the container will not run again.
	status corev1.ContainerStatus
	ended  bool
}

// newContainer returns a container that waits to be run, with the count of restarts it had before the node was last stopped.
func newContainer(p *pod, spec *corev1.Container, earlier []corev1.ContainerStatus) *container {
	c := &container{pod: p, spec: spec, program: p.node.Exec[spec.Image]}
	c.status = corev1.ContainerStatus{
		Name: spec.Name, Image: spec.Image, ImageID: spec.Image, Started: ptr.To(false),
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}},
	}
	for _, before := range earlier {
		if before.Name != spec.Name || before.State.Running == nil && before.LastTerminationState.Terminated == nil {
			continue
		}
		c.status.RestartCount = before.RestartCount
		if c.program != "" {
			c.status.RestartCount++
		}
	}
	return c
}

// run returns when the container will not run any more.
func (c *container) run() {
	if c.program == "" {
		c.simulate()
		return
	}
	delay := firstBackoff
	for {
		began := time.Now()
		code, reason := c.runOnce()
		if c.pod.ctx.Err() != nil || !c.restarts(code) {
			c.terminated(began, code, reason)
			return
		}
		if time.Since(began) > steadyAfter {
			delay = firstBackoff
		}
		c.crashed(began, code, reason)
		select {
		case <-c.pod.ctx.Done():
			c.terminated(began, code, reason)
			return
		case <-time.After(delay):
		}
		delay = min(2*delay, maxBackoff)
	}
}

// simulate reports a container that serves as running until the pod ends, and one that works as done.
func (c *container) simulate() {
	began := time.Now()
	if c.restarts(0) {
		c.running(began)
		<-c.pod.ctx.Done()
	}
	c.terminated(began, 0, "")
}

// runOnce runs the process to its end, which comes by itself or with the pod, and returns its exit code and why it is not 0.
func (c *container) runOnce() (code int32, reason string) {
	cmd, err := c.command()
	if err != nil {
		return startFailure, err.Error()
	}
	log, err := c.openLog()
	if err != nil {
		return startFailure, err.Error()
	}
	// The process has a descriptor of its own.
	defer func() { _ = log.Close() }()
	cmd.Stdout, cmd.Stderr = log, log
	process, err := startProcess(cmd)
	if err != nil {
		return startFailure, err.Error()
	}
	c.running(time.Now())
	select {
	case <-process.done:
	case <-c.pod.ctx.Done():
		process.stop(c.pod.grace())
	}
	return process.result()
}

// restarts says whether the container is to run again after it ended with code.
func (c *container) restarts(code int32) bool {
	if c.spec.RestartPolicy != nil {
		return *c.spec.RestartPolicy == corev1.ContainerRestartPolicyAlways
	}
	switch c.pod.object.Spec.RestartPolicy {
	case corev1.RestartPolicyNever:
		return false
	case corev1.RestartPolicyOnFailure:
		return code != 0
	default:
		return !c.isInit() || code != 0
	}
}

func (c *container) isInit() bool {
	for _, other := range c.pod.init {
		if other == c {
			return true
		}
	}
	return false
}

func (c *container) succeeded() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.ended && c.exitCode() == 0
}

func (c *container) exitCode() int32 {
	if c.status.State.Terminated == nil {
		return 0
	}
	return c.status.State.Terminated.ExitCode
}

func (c *container) running(since time.Time) {
	c.pod.change(func() {
		c.status.ContainerID = fmt.Sprintf("localkube://%s/%s/%d", c.pod.object.UID, c.spec.Name, c.status.RestartCount)
		c.status.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(since)}}
		c.status.Ready, c.status.Started = true, ptr.To(true)
	})
}

// crashed reports a process that has ended and will be started again.
func (c *container) crashed(began time.Time, code int32, reason string) {
	c.pod.change(func() {
		c.status.LastTerminationState = corev1.ContainerState{Terminated: c.termination(began, code, reason)}
		c.status.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
			Reason: "CrashLoopBackOff", Message: "the process ended and will be started again",
		}}
		c.status.Ready, c.status.Started = false, ptr.To(false)
		c.status.RestartCount++
	})
}

// terminated reports a container that has ended for good.
func (c *container) terminated(began time.Time, code int32, reason string) {
	c.pod.change(func() {
		c.ended = true
		c.status.State = corev1.ContainerState{Terminated: c.termination(began, code, reason)}
		c.status.Ready, c.status.Started = false, ptr.To(false)
	})
}

func (c *container) termination(began time.Time, code int32, message string) *corev1.ContainerStateTerminated {
	reason := "Completed"
	switch {
	case code == startFailure:
		reason = "StartError"
	case code != 0:
		reason = "Error"
	}
	return &corev1.ContainerStateTerminated{
		ExitCode: code, Reason: reason, Message: message, ContainerID: c.status.ContainerID,
		StartedAt: metav1.NewTime(began), FinishedAt: metav1.Now(),
	}
}
