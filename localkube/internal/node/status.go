package node

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// update recomputes the pod's conditions from the states of its containers.
func (p *pod) update(now time.Time) {
	initialized, ready := true, true
	for _, c := range p.init {
		initialized = initialized && (c.ended || c.status.Started != nil && *c.status.Started)
	}
	for _, c := range p.containers {
		ready = ready && c.status.Ready
	}
	reason := "ContainersNotReady"
	if phase := p.phase(); phase == corev1.PodSucceeded {
		reason = "PodCompleted"
	} else if phase == corev1.PodFailed {
		reason = "PodFailed"
	}
	p.condition(now, corev1.PodInitialized, initialized, "ContainersNotInitialized")
	p.condition(now, corev1.ContainersReady, ready, reason)
	p.condition(now, corev1.PodReady, ready, reason)
}

func (p *pod) condition(now time.Time, kind corev1.PodConditionType, is bool, whyNot string) {
	want := corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)}
	if !is {
		want.Status, want.Reason = corev1.ConditionFalse, whyNot
	}
	for i, have := range p.conditions {
		if have.Type != kind {
			continue
		}
		if have.Status == want.Status {
			want.LastTransitionTime = have.LastTransitionTime
		}
		p.conditions[i] = want
		return
	}
	p.conditions = append(p.conditions, want)
}

// phase is a summary of the states of the containers.
func (p *pod) phase() corev1.PodPhase {
	for _, c := range p.init {
		if c.ended && c.exitCode() != 0 {
			return corev1.PodFailed
		}
	}
	started, ended, failed := 0, 0, 0
	for _, c := range p.containers {
		if c.ended {
			ended++
			if c.exitCode() != 0 {
				failed++
			}
		}
		if c.ended || c.status.State.Running != nil || c.status.LastTerminationState.Terminated != nil {
			started++
		}
	}
	switch {
	case ended == len(p.containers) && failed > 0:
		return corev1.PodFailed
	case ended == len(p.containers):
		return corev1.PodSucceeded
	case started > 0:
		return corev1.PodRunning
	default:
		return corev1.PodPending
	}
}

func (p *pod) status() corev1.PodStatus {
	start := metav1.Now()
	if p.object.Status.StartTime != nil {
		start = *p.object.Status.StartTime
	} else {
		p.object.Status.StartTime = &start
	}
	ip := p.ip
	if p.object.Spec.HostNetwork {
		ip = address
	}
	status := corev1.PodStatus{
		Phase: p.phase(), Conditions: p.conditions, StartTime: &start,
		HostIP: address, HostIPs: []corev1.HostIP{{IP: address}}, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
	}
	for _, c := range p.init {
		status.InitContainerStatuses = append(status.InitContainerStatuses, c.status)
	}
	for _, c := range p.containers {
		status.ContainerStatuses = append(status.ContainerStatuses, c.status)
	}
	return status
}
