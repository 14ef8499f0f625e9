package clusterstatus

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
	// maxNodes and maxPods limit the nodes and pods of a cluster, because a member could return objects without end.
	// Kubernetes supports 5,000 nodes and 150,000 pods.
	maxNodes = 20_000
	maxPods  = 200_000
	// maxName is the maximum length of the name of a node in bytes. API servers reject longer names, so an object with
	// one is not counted.
	maxName = 253
	// podEntryBytes, nodeEntryBytes and loadEntryBytes are the sizes of a map entry for a pod, a node, and the load of a
	// node. They include free slots of the map, but no names and no extended resources.
	podEntryBytes, nodeEntryBytes, loadEntryBytes = 192, 192, 256
)

// uidHash identifies an object in less memory than its UID.
type uidHash [16]byte

func hashUID(uid types.UID) uidHash {
	sum := sha256.Sum256([]byte(uid))
	return uidHash(sum[:])
}

// pod is the counted part of a pod: its requests, and the name of its node (zero until it is scheduled).
type pod struct {
	node     unique.Handle[string]
	requests amounts
}

func (p pod) extraBytes() int { return p.requests.extraBytes() }

// The requests count three times: for p, and for their share in scheduled and in loadByNode.
func (p pod) totalBytes() int64 { return podEntryBytes + 3*int64(p.extraBytes()) }

// node is the counted part of a node. podCapacity is the number of pods that it can run.
type node struct {
	name        unique.Handle[string]
	ready       bool
	podCapacity int64
	allocatable amounts
}

func (n node) extraBytes() int { return n.allocatable.extraBytes() }

func (n node) totalBytes() int64 { return nodeEntryBytes + nameBytes(n.name) + int64(n.extraBytes()) }

// nameBytes returns the size of the name of a node, 0 for the zero value.
func nameBytes(name unique.Handle[string]) int64 {
	if name == (unique.Handle[string]{}) {
		return 0
	}
	return int64(len(name.Value()))
}

// load is a number of pods with amounts of resources: the requests of pods, or the capacity of nodes.
type load struct {
	pods    int64
	amounts amounts
}

// add adds one pod (factor 1), or subtracts it (factor -1).
func (l *load) add(requests amounts, factor int64) {
	l.pods += factor
	l.amounts.add(requests, factor)
}

// counters counts the nodes and pods of a cluster, and sums their resources.
type counters struct {
	// reservation is the memory for the nodes and pods; nil for no limit.
	reservation *kube.Reservation

	// mu guards everything below.
	mu sync.Mutex
	// usedBytes is the part of reservation that the nodes and pods need.
	usedBytes int64
	pods      map[uidHash]pod
	nodes     map[uidHash]node
	// podLimit limits pods to maxPods, and nodeLimit limits nodes to maxNodes.
	podLimit, nodeLimit *kube.ObjectLimit
	maxPods, maxNodes   int64
	// unscheduled is the load of the pods without a node, and scheduled the load of all others. loadByNode has the load
	// of each node name with pods.
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

// entry has the counted part of a pod or node. It implements runtime.Object, because a reflector keeps it in lists.
type entry[T countedPart] struct {
	uid   uidHash
	value T
	// isIgnored is true if the object does not count: it was deleted, has finished or has an invalid node name.
	isIgnored bool
}

// countedPart is a pod or node.
type countedPart interface {
	// extraBytes returns the memory that the value needs besides its struct.
	extraBytes() int
	// totalBytes returns the memory that the value needs in the counters.
	totalBytes() int64
}

var _ runtime.Object = &entry[pod]{}

// GetObjectKind returns no kind.
func (*entry[T]) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject returns a copy that shares the map of the value, which is never changed.
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
	e.value = node{name: unique.Make(n.Name), allocatable: toAmounts(n.Status.Allocatable)}
	e.value.podCapacity = n.Status.Allocatable.Pods().Value()
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			e.value.ready = condition.Status == corev1.ConditionTrue
		}
	}
	return e
}

// updateWithReservation reserves maxGrowth bytes, calls update with mu locked, and releases the bytes that update did
// not need. If the bytes cannot be reserved, it returns an error and does not call update.
func (c *counters) updateWithReservation(maxGrowth int64, update func() error) error {
	// A reflector passes no context to its store. Add waits for a limited time.
	if err := c.reservation.Add(context.Background(), maxGrowth); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.usedBytes
	err := update()
	c.reservation.Subtract(maxGrowth - (c.usedBytes - before))
	return err
}

// setPod counts the current state of a pod. It returns an error if the number of pods or the memory is exceeded.
func (c *counters) setPod(e *entry[pod]) error {
	return c.updateWithReservation(podGrowth(e), func() error { return c.setPodLocked(e) })
}

// podGrowth returns the maximum number of bytes that a pod adds to the counters.
func podGrowth(e *entry[pod]) int64 {
	if e.isIgnored {
		return 0
	}
	return e.value.totalBytes() + loadEntryBytes + nameBytes(e.value.node)
}

// setPodLocked is setPod for callers that hold mu.
func (c *counters) setPodLocked(e *entry[pod]) error {
	if old, ok := c.pods[e.uid]; ok {
		c.addToLoads(old, -1)
		c.podLimit.Remove(old.extraBytes())
		c.usedBytes -= old.totalBytes()
		delete(c.pods, e.uid)
	}
	if e.isIgnored {
		return nil
	}
	if err := c.podLimit.Add(e.value.extraBytes()); err != nil {
		return err
	}
	c.addToLoads(e.value, 1)
	c.usedBytes += e.value.totalBytes()
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
		c.usedBytes += loadEntryBytes + nameBytes(p.node)
	}
	onNode.add(p.requests, factor)
	if onNode.pods == 0 {
		delete(c.loadByNode, p.node)
		c.usedBytes -= loadEntryBytes + nameBytes(p.node)
	}
}

// replacePods counts these pods and removes all others. If there is not enough memory for them, it returns an error and
// changes nothing. kube.LimitedStore has limited their number, so setPodLocked cannot fail.
func (c *counters) replacePods(all []*entry[pod]) error {
	needed, loads := int64(0), map[unique.Handle[string]]bool{}
	for _, e := range all {
		if e.isIgnored {
			continue
		}
		needed += e.value.totalBytes()
		if name := e.value.node; nameBytes(name) > 0 && !loads[name] {
			loads[name] = true
			needed += loadEntryBytes + nameBytes(name)
		}
	}
	before := c.sumPodBytes() // stays valid, because only this reflector changes the pods
	// The old and the new pods are in memory together for a moment. The reservation for the list covers the new ones.
	return c.updateWithReservation(max(0, needed-before), func() error {
		c.usedBytes -= before
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

// sumPodBytes returns the part of usedBytes for the pods and their loads.
func (c *counters) sumPodBytes() (sum int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pods {
		sum += p.totalBytes()
	}
	for name := range c.loadByNode {
		sum += loadEntryBytes + nameBytes(name)
	}
	return sum
}

// sumNodeBytes returns the part of usedBytes for the nodes.
func (c *counters) sumNodeBytes() (sum int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nodes {
		sum += n.totalBytes()
	}
	return sum
}

// setNode counts the current state of a node, with the errors of setPod.
func (c *counters) setNode(e *entry[node]) error {
	return c.updateWithReservation(nodeGrowth(e), func() error { return c.setNodeLocked(e) })
}

// nodeGrowth returns the maximum number of bytes that a node adds to the counters.
func nodeGrowth(e *entry[node]) int64 {
	if e.isIgnored {
		return 0
	}
	return e.value.totalBytes()
}

// setNodeLocked is setNode for callers that hold mu.
func (c *counters) setNodeLocked(e *entry[node]) error {
	if old, ok := c.nodes[e.uid]; ok {
		c.nodeLimit.Remove(old.extraBytes())
		c.usedBytes -= old.totalBytes()
		delete(c.nodes, e.uid)
	}
	if e.isIgnored {
		return nil
	}
	if err := c.nodeLimit.Add(e.value.extraBytes()); err != nil {
		return err
	}
	c.usedBytes += e.value.totalBytes()
	c.nodes[e.uid] = e.value
	return nil
}

// replaceNodes counts these nodes and removes all others, with the errors of replacePods.
func (c *counters) replaceNodes(all []*entry[node]) error {
	needed := int64(0)
	for _, e := range all {
		needed += nodeGrowth(e)
	}
	before := c.sumNodeBytes()
	return c.updateWithReservation(max(0, needed-before), func() error {
		c.usedBytes -= before
		c.nodes, c.nodeLimit = make(map[uidHash]node, len(all)), kube.NewObjectLimit(c.maxNodes, "nodes")
		for _, e := range all {
			_ = c.setNodeLocked(e)
		}
		c.setSynced(&c.nodeWatch)
		return nil
	})
}

// setSynced records that all objects of a kind were listed, and closes synced once both kinds were. The caller holds
// mu.
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

// setWatching records that the watch of a kind is established again.
func (c *counters) setWatching(state *watchState) {
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

// resetFailures restarts the time until a watch counts as lost. Observe calls it while the cluster is unhealthy,
// because its health explains the failures.
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
// counters and returns the reasons. A summary of objects that were never listed stays unchanged.
func (c *counters) writeSummaries(status *clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel, now time.Time) (staleReasons []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	nodeFailure, nodesPending := c.nodeWatch.evaluate(now)
	podFailure, podsPending := c.podWatch.evaluate(now)
	var nodeSummary *clusterv1alpha1.NodeSummary
	resources := &clusterv1alpha1.ResourceSummary{}
	if nodeFailure == "" {
		nodeSummary, resources.Allocatable = c.sumNodes()
	} else {
		staleReasons = append(staleReasons, "nodes cannot be counted: "+nodeFailure)
	}
	if podFailure == "" {
		resources.Allocating, resources.Allocated = c.unscheduled.amounts.toResourceList(c.unscheduled.pods), c.scheduled.amounts.toResourceList(c.scheduled.pods)
	} else {
		staleReasons = append(staleReasons, "pods cannot be counted: "+podFailure)
	}
	switch {
	case nodeFailure != "" && podFailure != "":
		resources = nil
	case nodeFailure == "" && podFailure == "":
		resources.AllocatableModelings = c.countGrades(models)
	}
	if !nodesPending {
		status.NodeSummary = nodeSummary
	}
	// Another notation of the same quantities must not change the status.
	if !nodesPending && !podsPending && !equality.Semantic.DeepEqual(status.ResourceSummary, resources) {
		status.ResourceSummary = resources
	}
	return staleReasons
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
	return nodes, capacity.amounts.toResourceList(capacity.pods)
}

// countGrades counts the nodes of each grade by their free resources.
func (c *counters) countGrades(models []clusterv1alpha1.ResourceModel) []clusterv1alpha1.AllocatableModeling {
	sorted := sortGrades(models)
	var counts []clusterv1alpha1.AllocatableModeling
	for _, model := range sorted {
		counts = append(counts, clusterv1alpha1.AllocatableModeling{Grade: model.Grade})
	}
	for _, n := range c.nodes {
		if free, hasRoom := c.freeAmounts(n); hasRoom {
			if i := sorted.indexOf(free); i >= 0 {
				counts[i].Count++
			}
		}
	}
	return counts
}

// freeAmounts returns the allocatable resources of a node minus the requests of its pods, which can be negative, and
// whether the node has room for one more pod.
func (c *counters) freeAmounts(n node) (free amounts, hasRoom bool) {
	used := load{}
	if onNode := c.loadByNode[n.name]; onNode != nil {
		used = *onNode
	}
	// free starts empty, because add changes the map of its receiver, and the map of n must stay unchanged.
	free.add(n.allocatable, 1)
	free.add(used.amounts, -1)
	return free, n.podCapacity > used.pods
}
