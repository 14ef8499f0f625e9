package node

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/version"
)

// address is the node's; the pods get those that follow it. Endpoints may not be loopback addresses, so these lead nowhere.
const address = "10.244.0.1"

// Options say what the node is.
type Options struct {
	// Name is the name of the Node object.
	Name string
	// Dir holds the logs of processes and the credentials of running pods, in Dir/pods.
	Dir string
	// Client may do everything.
	Client kubernetes.Interface
	// Exec maps container images to the programs to run for them, as absolute paths.
	Exec map[string]string
	// Host and Port are where pods find the API server; CA is the certificate authority it is verified with, in PEM.
	Host, Port string
	CA         []byte
}

// Node is the simulated node.
type Node struct {
	Options

	// mu guards what follows. It is held only for moments, and no other lock is taken under it.
	mu   sync.Mutex
	pods map[types.UID]*pod
	last netip.Addr
}

// New returns a node that is not registered and runs nothing yet.
func New(opts Options) *Node {
	return &Node{Options: opts, pods: map[types.UID]*pod{}, last: netip.MustParseAddr(address)}
}

// Register makes the node known, ready and free of taints.
func (n *Node) Register(ctx context.Context) error {
	nodes := n.Client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("register node %s: %w", n.Name, err)
	}
	var last error
	pace := wait.Backoff{Steps: 5, Duration: 10 * time.Millisecond, Jitter: 0.1}
	// The package retry of client-go would take a request that was cut off for one that succeeded.
	err = wait.ExponentialBackoffWithContext(ctx, pace, func(ctx context.Context) (bool, error) {
		last = n.report(ctx)
		return !apierrors.IsConflict(last), nil
	})
	if last != nil {
		err = last
	}
	if err != nil {
		return fmt.Errorf("report node %s ready: %w", n.Name, err)
	}
	return nil
}

// report writes what Register says of the node that exists.
func (n *Node) report(ctx context.Context) error {
	nodes := n.Client.CoreV1().Nodes()
	have, err := nodes.Get(ctx, n.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	have.Labels = map[string]string{
		corev1.LabelHostname: n.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: runtime.GOARCH,
	}
	have.Spec.Taints = nil
	have, err = nodes.Update(ctx, have, metav1.UpdateOptions{})
	if err != nil {
		return err
	}
	have.Status = n.status()
	_, err = nodes.UpdateStatus(ctx, have, metav1.UpdateOptions{})
	return err
}

func (n *Node) status() corev1.NodeStatus {
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("64"),
		corev1.ResourceMemory:           resource.MustParse("256Gi"),
		corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
		corev1.ResourcePods:             resource.MustParse("10k"),
	}
	now := metav1.Now()
	conditions := []corev1.NodeCondition{
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", Message: "the simulated node is ready"},
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientMemory"},
		{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasNoDiskPressure"},
		{Type: corev1.NodePIDPressure, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficientPID"},
	}
	for i := range conditions {
		conditions[i].LastHeartbeatTime, conditions[i].LastTransitionTime = now, now
	}
	return corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity, Conditions: conditions,
		Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeInternalIP, Address: address}, {Type: corev1.NodeHostName, Address: n.Name},
		},
		NodeInfo: corev1.NodeSystemInfo{
			KubeletVersion: version.Get().GitVersion, OperatingSystem: "linux", Architecture: runtime.GOARCH,
			OSImage: "localkube", KernelVersion: "none", ContainerRuntimeVersion: "localkube://1",
		},
	}
}

// Run runs the pods that are bound to the node until ctx ends, and returns when every process is gone.
func (n *Node) Run(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(n.Client, 0,
		informers.WithTweakListOptions(func(options *metav1.ListOptions) {
			options.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", n.Name).String()
		}))
	var workers sync.WaitGroup
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(obj any, _ bool) { n.observe(ctx, &workers, obj.(*corev1.Pod)) },
		UpdateFunc: func(_, obj any) { n.observe(ctx, &workers, obj.(*corev1.Pod)) },
		DeleteFunc: func(obj any) {
			if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = tombstone.Obj
			}
			n.forget(obj.(*corev1.Pod))
		},
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	// Its handlers have returned when Shutdown does, so that no worker is added while they are waited for.
	factory.Shutdown()
	workers.Wait()
	return nil
}

// observe starts a worker for a pod it has not seen, and tells the worker of a pod that is being deleted.
func (n *Node) observe(ctx context.Context, workers *sync.WaitGroup, object *corev1.Pod) {
	n.mu.Lock()
	p := n.pods[object.UID]
	if p == nil {
		n.last = n.last.Next()
		p = newPod(ctx, n, object.DeepCopy(), n.last.String())
		n.pods[object.UID] = p
		workers.Go(p.run)
	}
	n.mu.Unlock()
	if object.DeletionTimestamp != nil {
		p.end(deleted{grace: object.DeletionGracePeriodSeconds})
	}
}

// forget ends the worker of a pod that is no more.
func (n *Node) forget(object *corev1.Pod) {
	n.mu.Lock()
	p := n.pods[object.UID]
	delete(n.pods, object.UID)
	n.mu.Unlock()
	if p != nil {
		p.end(errGone)
	}
}
