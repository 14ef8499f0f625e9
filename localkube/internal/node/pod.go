package node

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

const (
	// shutdownGrace is how long processes get to end when the whole node stops.
	shutdownGrace = time.Second
	// requestRetry is how long to wait before a request to the API server is tried again.
	requestRetry = 200 * time.Millisecond
)

// deleted is why a pod's context ends when someone deletes the pod.
type deleted struct {
	// grace is the time in seconds that its processes get to end; the API server fills it in.
	grace *int64
}

func (deleted) Error() string { return "pod deleted" }

// errGone is why a pod's context ends when its object vanishes: nobody is left to report to.
var errGone = errors.New("pod gone")

// pod is the worker for one pod.
type pod struct {
	node   *Node
	object *corev1.Pod
	dir    string

	// nodeCtx ends when the node stops. ctx is the pod's own: it also ends, by end, when the pod should.
	nodeCtx context.Context //nolint:containedctx // a pod is a task, and this is its life
	ctx     context.Context //nolint:containedctx // as above
	end     context.CancelCauseFunc

	// credentials guards hasToken, and is held until the pod's first token is there.
	credentials sync.Mutex
	hasToken    bool

	// mu guards what follows. It is held while the status is sent, so that statuses arrive in order.
	mu         sync.Mutex
	ip         string
	init       []*container
	containers []*container
	conditions []corev1.PodCondition
}

func newPod(ctx context.Context, n *Node, object *corev1.Pod, ip string) *pod {
	own, end := context.WithCancelCause(ctx)
	p := &pod{node: n, object: object, nodeCtx: ctx, ctx: own, end: end, ip: ip, dir: podDir(n.Dir, object)}
	for i := range object.Spec.InitContainers {
		p.init = append(p.init, newContainer(p, &object.Spec.InitContainers[i], object.Status.InitContainerStatuses))
	}
	for i := range object.Spec.Containers {
		p.containers = append(p.containers, newContainer(p, &object.Spec.Containers[i], object.Status.ContainerStatuses))
	}
	return p
}

// run lives as long as the pod.
func (p *pod) run() {
	if p.object.Status.Phase != corev1.PodSucceeded && p.object.Status.Phase != corev1.PodFailed {
		p.runContainers()
	}
	<-p.ctx.Done()
	// What is left holds credentials that are void by now.
	_ = os.RemoveAll(p.dir)
	var end deleted
	if errors.As(context.Cause(p.ctx), &end) {
		p.remove()
	}
}

// runContainers runs init containers one after the other, then all others at once, and returns when none will run any more.
func (p *pod) runContainers() {
	var running sync.WaitGroup
	defer running.Wait()
	for _, c := range p.init {
		if ptr.Deref(c.spec.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways {
			running.Go(c.run)
			continue
		}
		if c.run(); !c.succeeded() {
			return
		}
	}
	for _, c := range p.containers {
		running.Go(c.run)
	}
}

// grace is how long a process gets to end after it was asked to.
func (p *pod) grace() time.Duration {
	var end deleted
	switch cause := context.Cause(p.ctx); {
	case errors.As(cause, &end):
		return time.Duration(ptr.Deref(end.grace, 30)) * time.Second
	case errors.Is(cause, errGone):
		return 0
	default:
		return shutdownGrace
	}
}

// change lets modify change the state of containers and reports the status that results.
func (p *pod) change(modify func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	modify()
	if p.nodeCtx.Err() != nil || errors.Is(context.Cause(p.ctx), errGone) {
		return
	}
	p.update(time.Now())
	// The UID makes the API server refuse a patch of another pod by the same name.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.object.UID}, "status": p.status()})
	if err != nil {
		panic(err) // a PodStatus can always be encoded
	}
	p.persist(func(ctx context.Context) error {
		_, err := p.node.Client.CoreV1().Pods(p.object.Namespace).Patch(ctx, p.object.Name, types.StrategicMergePatchType, patch,
			metav1.PatchOptions{FieldManager: "localkube"}, "status")
		return err
	})
}

// remove deletes the object of a pod whose containers have ended.
func (p *pod) remove() {
	p.persist(func(ctx context.Context) error {
		return p.node.Client.CoreV1().Pods(p.object.Namespace).Delete(ctx, p.object.Name, metav1.DeleteOptions{
			GracePeriodSeconds: ptr.To(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(p.object.UID)),
		})
	})
}

// persist repeats request until it is done, or there is no such pod any more, or the node stops.
func (p *pod) persist(request func(context.Context) error) {
	_ = wait.PollUntilContextCancel(p.nodeCtx, requestRetry, true, func(ctx context.Context) (bool, error) {
		err := request(ctx)
		if err != nil && !apierrors.IsNotFound(err) {
			klog.ErrorS(err, "report pod", "pod", klog.KObj(p.object))
		}
		return err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err), nil
	})
}
