package survey

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// maxNodes and maxPods limit the nodes and pods of a cluster, which could return objects without end. Kubernetes
	// supports 5,000 nodes and 150,000 pods.
	maxNodes = 20_000
	maxPods  = 200_000
	// maxName is the maximum length of the name of a node. An object with a longer name is not counted: no API server
	// stores it.
	maxName = 253
	// podMemory, nodeMemory and loadMemory are the bytes of one map entry for a pod, a node, and the load of a node. They
	// include the unused part of a map that grows, but no names and no extended resources.
	podMemory, nodeMemory, loadMemory = 192, 192, 256
)

// uidHash identifies an object in less memory than its UID.
type uidHash [16]byte

func hashUID(uid types.UID) uidHash {
	sum := sha256.Sum256([]byte(uid))
	return uidHash(sum[:])
}

// pod is the stored part of a pod: its requests, and the name of its node (zero until it is scheduled).
type pod struct {
	node     unique.Handle[string]
	requests amounts
}

// size returns how much memory p needs besides the struct, in bytes.
func (p pod) size() int { return p.requests.size() }

// memory returns how much memory p needs in the counters, in bytes. Its resources count three times: they are in p, and
// can be in two loads.
func (p pod) memory() int64 { return podMemory + 3*int64(p.size()) }

// node is the stored part of a node. podCapacity is the number of pods that it can run.
type node struct {
	name        unique.Handle[string]
	ready       bool
	podCapacity int64
	allocatable amounts
}

// size returns how much memory n needs besides the struct, in bytes.
func (n node) size() int { return n.allocatable.size() }

// memory returns how much memory n needs in the counters, in bytes.
func (n node) memory() int64 { return nodeMemory + nameSize(n.name) + int64(n.size()) }

// nameSize returns the size of the name of a node in bytes, 0 for the zero value.
func nameSize(name unique.Handle[string]) int64 {
	if name == (unique.Handle[string]{}) {
		return 0
	}
	return int64(len(name.Value()))
}

// load is a number of pods and amounts of resources: what pods request, or what nodes can have at most.
type load struct {
	pods    int64
	amounts amounts
}

func (l *load) add(requests amounts, factor int64) {
	l.pods += factor
	l.amounts.add(requests, factor)
}

// counters counts the nodes and pods of a cluster, and sums their resources.
type counters struct {
	// memory is reserved for the nodes and pods; nil for no limit.
	memory *kube.Reservation

	// mu guards everything below.
	mu sync.Mutex
	// size is the part of memory that the nodes and pods need, in bytes.
	size  int64
	pods  map[uidHash]pod
	nodes map[uidHash]node
	// podLimit limits pods to maxPods, and nodeLimit limits nodes to maxNodes.
	podLimit, nodeLimit *kube.ObjectLimit
	maxPods, maxNodes   int64
	// unscheduled is the load of the pods without a node, scheduled the load of all others, and loadByNode splits
	// scheduled by node.
	unscheduled, scheduled load
	loadByNode             map[unique.Handle[string]]*load
	// podWatch and nodeWatch are the states of the two watches. synced is closed once both kinds were listed.
	podWatch, nodeWatch watchState
	synced              chan struct{}
}

func newCounters() *counters { return newLimitedCounters(maxNodes, maxPods) }

// newLimitedCounters returns counters for at most these numbers of nodes and pods.
func newLimitedCounters(maxNodes, maxPods int64) *counters {
	return &counters{
		pods: map[uidHash]pod{}, nodes: map[uidHash]node{}, loadByNode: map[unique.Handle[string]]*load{}, synced: make(chan struct{}),
		maxNodes: maxNodes, nodeLimit: kube.NewObjectLimit(maxNodes, "nodes"), maxPods: maxPods, podLimit: kube.NewObjectLimit(maxPods, "pods"),
	}
}

// entry is the stored part of an object, as a reflector passes it on. It is a runtime.Object for the lists of the
// reflector.
type entry[T sized] struct {
	uid   uidHash
	value T
	// isIgnored is true if the object was deleted, has finished or has an invalid node name, and does not count.
	isIgnored bool
}

// sized is the stored part of a pod or node.
type sized interface {
	size() int
	memory() int64
}

var _ runtime.Object = &entry[pod]{}

// GetObjectKind returns no kind.
func (*entry[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns a copy. The value is never changed.
func (e *entry[T]) DeepCopyObject() runtime.Object {
	copied := *e
	return &copied
}

// newPodEntry converts a pod.
func newPodEntry(p *corev1.Pod) *entry[pod] {
	e := &entry[pod]{uid: hashUID(p.UID), isIgnored: p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed}
	if len(p.Spec.NodeName) > maxName {
		e.isIgnored = true
		return e
	}
	e.value.requests = podRequests(&p.Spec)
	if p.Spec.NodeName != "" {
		e.value.node = unique.Make(p.Spec.NodeName)
	}
	return e
}

// newNodeEntry converts a node.
func newNodeEntry(n *corev1.Node) *entry[node] {
	e := &entry[node]{uid: hashUID(n.UID)}
	if len(n.Name) > maxName {
		e.isIgnored = true
		return e
	}
	e.value = node{name: unique.Make(n.Name), allocatable: amountsOf(n.Status.Allocatable)}
	e.value.podCapacity = n.Status.Allocatable.Pods().Value()
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			e.value.ready = condition.Status == corev1.ConditionTrue
		}
	}
	return e
}

// updateReserved reserves maxGrowth bytes of memory, calls update with mu locked, and releases the part that update did
// not need. If the memory cannot be reserved, it does not call update.
func (c *counters) updateReserved(maxGrowth int64, update func() error) error {
	// A reflector passes no context to its store. Add waits for a limited time.
	if err := c.memory.Add(context.Background(), maxGrowth); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.size
	err := update()
	c.memory.Subtract(maxGrowth - (c.size - before))
	return err
}

// setPod counts the current state of a pod. It returns an error if there are too many, or if there is no memory for it.
func (c *counters) setPod(e *entry[pod]) error {
	return c.updateReserved(podGrowth(e), func() error { return c.setPodLocked(e) })
}

// podGrowth returns the most memory that a pod adds to the counters, in bytes.
func podGrowth(e *entry[pod]) int64 {
	if e.isIgnored {
		return 0
	}
	return e.value.memory() + loadMemory + nameSize(e.value.node)
}

// setPodLocked is setPod for callers that hold mu.
func (c *counters) setPodLocked(e *entry[pod]) error {
	if old, ok := c.pods[e.uid]; ok {
		c.addToLoads(old, -1)
		c.podLimit.Remove(old.size())
		c.size -= old.memory()
		delete(c.pods, e.uid)
	}
	if e.isIgnored {
		return nil
	}
	if err := c.podLimit.Add(e.value.size()); err != nil {
		return err
	}
	c.addToLoads(e.value, 1)
	c.size += e.value.memory()
	c.pods[e.uid] = e.value
	return nil
}

// addToLoads adds a pod to the loads (factor 1) or subtracts it (factor -1).
func (c *counters) addToLoads(p pod, factor int64) {
	if p.node == (unique.Handle[string]{}) {
		c.unscheduled.add(p.requests, factor)
		return
	}
	c.scheduled.add(p.requests, factor)
	onNode := c.loadByNode[p.node]
	if onNode == nil {
		onNode = &load{}
		c.loadByNode[p.node] = onNode
		c.size += loadMemory + nameSize(p.node)
	}
	onNode.add(p.requests, factor)
	if onNode.pods == 0 {
		delete(c.loadByNode, p.node)
		c.size -= loadMemory + nameSize(p.node)
	}
}

// setPods counts these pods and removes all others. The reflector has limited their number. It returns an error, and
// changes nothing, if there is no memory for them.
func (c *counters) setPods(all []*entry[pod]) error {
	needed, loads := int64(0), map[unique.Handle[string]]bool{}
	for _, e := range all {
		if e.isIgnored {
			continue
		}
		needed += e.value.memory()
		if name := e.value.node; nameSize(name) > 0 && !loads[name] {
			loads[name] = true
			needed += loadMemory + nameSize(name)
		}
	}
	before := c.podsMemory() // stays valid: only the reflector of the pods changes them
	// The earlier pods and all are in memory together for a moment, while the memory of the list is still reserved.
	return c.updateReserved(max(0, needed-before), func() error {
		c.size -= before
		c.pods, c.loadByNode = make(map[uidHash]pod, len(all)), map[unique.Handle[string]]*load{}
		c.podLimit = kube.NewObjectLimit(c.maxPods, "pods")
		c.unscheduled, c.scheduled = load{}, load{}
		for _, e := range all {
			_ = c.setPodLocked(e)
		}
		c.setSynced(&c.podWatch)
		return nil
	})
}

// podsMemory returns the part of size that the pods and their loads need.
func (c *counters) podsMemory() (memory int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		memory += p.memory()
	}
	for name := range c.loadByNode {
		memory += loadMemory + nameSize(name)
	}
	return memory
}

// nodesMemory returns the part of size that the nodes need.
func (c *counters) nodesMemory() (memory int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nodes {
		memory += n.memory()
	}
	return memory
}

// setNode is like setPod.
func (c *counters) setNode(e *entry[node]) error {
	return c.updateReserved(nodeGrowth(e), func() error { return c.setNodeLocked(e) })
}

// nodeGrowth returns the memory that a node adds to the counters, in bytes.
func nodeGrowth(e *entry[node]) int64 {
	if e.isIgnored {
		return 0
	}
	return e.value.memory()
}

// setNodeLocked is setNode for callers that hold mu.
func (c *counters) setNodeLocked(e *entry[node]) error {
	if old, ok := c.nodes[e.uid]; ok {
		c.nodeLimit.Remove(old.size())
		c.size -= old.memory()
		delete(c.nodes, e.uid)
	}
	if e.isIgnored {
		return nil
	}
	if err := c.nodeLimit.Add(e.value.size()); err != nil {
		return err
	}
	c.size += e.value.memory()
	c.nodes[e.uid] = e.value
	return nil
}

// setNodes is like setPods.
func (c *counters) setNodes(all []*entry[node]) error {
	needed := int64(0)
	for _, e := range all {
		needed += nodeGrowth(e)
	}
	before := c.nodesMemory()
	return c.updateReserved(max(0, needed-before), func() error {
		c.size -= before
		c.nodes, c.nodeLimit = make(map[uidHash]node, len(all)), kube.NewObjectLimit(c.maxNodes, "nodes")
		for _, e := range all {
			_ = c.setNodeLocked(e)
		}
		c.setSynced(&c.nodeWatch)
		return nil
	})
}

// setSynced records that all objects of a kind are known, and closes synced once both kinds are. The caller holds mu.
func (c *counters) setSynced(state *watchState) {
	state.setWatching()
	state.hasSynced = true
	select {
	case <-c.synced:
	default:
		if c.podWatch.hasSynced && c.nodeWatch.hasSynced {
			close(c.synced)
		}
	}
}

// recordWatch records that the watch of a kind is established again.
func (c *counters) recordWatch(state *watchState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state.setWatching()
}

// setFailed records that a list or watch of a kind has failed.
func (c *counters) setFailed(state *watchState, verb string, err error, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	state.setFailed(verb, err, at)
}

// resetFailures restarts the time until a watch counts as lost. It is called while the cluster is unhealthy, which
// explains the failures.
func (c *counters) resetFailures() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, state := range []*watchState{&c.podWatch, &c.nodeWatch} {
		if !state.isLost {
			state.failingSince, state.message = time.Time{}, ""
		}
	}
}

// waitForSync waits until both kinds were listed, ctx ends or the timeout has passed.
func (c *counters) waitForSync(ctx context.Context, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-c.synced:
	case <-ctx.Done():
	}
}

// writeSummaries writes the counters into status. models are the spec.resourceModels of the Cluster. It removes stale
// counters and returns the reasons. Counters of a kind that was never listed keep their old value.
func (c *counters) writeSummaries(status *clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel, at time.Time) (reasons []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	nodeFailure, nodesPending := c.nodeWatch.evaluate(at)
	podFailure, podsPending := c.podWatch.evaluate(at)
	var summary *clusterv1alpha1.NodeSummary
	resources := &clusterv1alpha1.ResourceSummary{}
	if nodeFailure == "" {
		summary, resources.Allocatable = c.sumNodes()
	} else {
		reasons = append(reasons, "nodes cannot be counted: "+nodeFailure)
	}
	if podFailure == "" {
		resources.Allocating, resources.Allocated = c.unscheduled.amounts.list(c.unscheduled.pods), c.scheduled.amounts.list(c.scheduled.pods)
	} else {
		reasons = append(reasons, "pods cannot be counted: "+podFailure)
	}
	switch {
	case nodeFailure != "" && podFailure != "":
		resources = nil
	case nodeFailure == "" && podFailure == "":
		resources.AllocatableModelings = c.countGrades(models)
	}
	if !nodesPending {
		status.NodeSummary = summary
	}
	// Equal quantities may differ in notation.
	if !nodesPending && !podsPending && !equality.Semantic.DeepEqual(status.ResourceSummary, resources) {
		status.ResourceSummary = resources
	}
	return reasons
}

// sumNodes counts the nodes, and sums their allocatable resources.
func (c *counters) sumNodes() (*clusterv1alpha1.NodeSummary, corev1.ResourceList) {
	nodes, capacity := &clusterv1alpha1.NodeSummary{}, load{}
	for _, n := range c.nodes {
		nodes.TotalNum++
		if n.ready {
			nodes.ReadyNum++
		}
		capacity.pods += n.podCapacity
		capacity.amounts.add(n.allocatable, 1)
	}
	return nodes, capacity.amounts.list(capacity.pods)
}

// countGrades counts the nodes of each grade by their free resources.
func (c *counters) countGrades(models []clusterv1alpha1.ResourceModel) []clusterv1alpha1.AllocatableModeling {
	sorted := sortGrades(models)
	var counts []clusterv1alpha1.AllocatableModeling
	for _, g := range sorted {
		counts = append(counts, clusterv1alpha1.AllocatableModeling{Grade: g.Grade})
	}
	for _, n := range c.nodes {
		if free, hasRoom := c.freeAmounts(n); hasRoom {
			if grade := sorted.indexOf(free); grade >= 0 {
				counts[grade].Count++
			}
		}
	}
	return counts
}

// freeAmounts returns the allocatable resources of a node minus the requests of its pods, and whether the node has room
// for one more pod.
func (c *counters) freeAmounts(n node) (free amounts, hasRoom bool) {
	used := load{}
	if onNode := c.loadByNode[n.name]; onNode != nil {
		used = *onNode
	}
	// add changes the map of its receiver, and the map of the node must stay unchanged.
	free.add(n.allocatable, 1)
	free.add(used.amounts, -1)
	return free, n.podCapacity > used.pods
}
