package survey

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// id stands for a uid in a quarter of its memory.
type id [16]byte

func idOf(uid types.UID) id {
	sum := sha256.Sum256([]byte(uid))
	return id(sum[:])
}

// pod is what is kept of a pod: what it asks for, and the name of its node, zero while it has none.
type pod struct {
	node unique.Handle[string]
	asks amounts
}

// node is what is kept of a node.
type node struct {
	name   unique.Handle[string]
	ready  bool
	pods   int64
	offers amounts
}

// load is what some pods ask for together.
type load struct {
	pods int64
	asks amounts
}

func (l *load) add(asks amounts, times int64) {
	l.pods += times
	l.asks.add(asks, times)
}

// tally adds up the nodes and pods of a cluster as they come and go.
type tally struct {
	// mu guards everything below.
	mu    sync.Mutex
	pods  map[id]pod
	nodes map[id]node
	// unbound is what pods without a node ask for, bound what the others do, on what node by byNode.
	unbound, bound load
	byNode         map[unique.Handle[string]]*load
	// podFeed and nodeFeed say how well the pods and nodes can be followed; known is closed when both were listed once.
	podFeed, nodeFeed feed
	known             chan struct{}
}

func newTally() *tally {
	return &tally{pods: map[id]pod{}, nodes: map[id]node{}, byNode: map[unique.Handle[string]]*load{}, known: make(chan struct{})}
}

// seen is one object as a reflector hands it on: what is kept of it, and the id of it.
type seen[T any] struct {
	id   id
	kept T
	// over says that it counts no more.
	over bool
}

// podOf returns what is kept of a pod.
func podOf(p *corev1.Pod) seen[pod] {
	s := seen[pod]{id: idOf(p.UID), over: p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed}
	s.kept.asks = asked(&p.Spec)
	if p.Spec.NodeName != "" {
		s.kept.node = unique.Make(p.Spec.NodeName)
	}
	return s
}

// nodeOf returns what is kept of a node.
func nodeOf(n *corev1.Node) seen[node] {
	s := seen[node]{id: idOf(n.UID), kept: node{name: unique.Make(n.Name), offers: amountsOf(n.Status.Allocatable)}}
	s.kept.pods = n.Status.Allocatable.Pods().Value()
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			s.kept.ready = condition.Status == corev1.ConditionTrue
		}
	}
	return s
}

// setPod counts a pod as it is now.
func (t *tally) setPod(s seen[pod]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.putPod(s)
}

// putPod is setPod for whoever holds the lock.
func (t *tally) putPod(s seen[pod]) {
	if had, ok := t.pods[s.id]; ok {
		t.weigh(had, -1)
		delete(t.pods, s.id)
	}
	if !s.over {
		t.weigh(s.kept, 1)
		t.pods[s.id] = s.kept
	}
}

// weigh adds a pod to the sums, or takes it out of them.
func (t *tally) weigh(p pod, times int64) {
	if p.node == (unique.Handle[string]{}) {
		t.unbound.add(p.asks, times)
		return
	}
	t.bound.add(p.asks, times)
	on := t.byNode[p.node]
	if on == nil {
		on = &load{}
		t.byNode[p.node] = on
	}
	on.add(p.asks, times)
	if on.pods == 0 {
		delete(t.byNode, p.node)
	}
}

// setPods counts these pods and no others.
func (t *tally) setPods(all []seen[pod]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pods, t.byNode = make(map[id]pod, len(all)), map[unique.Handle[string]]*load{}
	t.unbound, t.bound = load{}, load{}
	for _, s := range all {
		t.putPod(s)
	}
	t.listed(&t.podFeed)
}

// setNode counts a node as it is now.
func (t *tally) setNode(s seen[node]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.putNode(s)
}

// putNode is setNode for whoever holds the lock.
func (t *tally) putNode(s seen[node]) {
	if s.over {
		delete(t.nodes, s.id)
		return
	}
	t.nodes[s.id] = s.kept
}

// setNodes counts these nodes and no others.
func (t *tally) setNodes(all []seen[node]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.nodes = make(map[id]node, len(all))
	for _, s := range all {
		t.putNode(s)
	}
	t.listed(&t.nodeFeed)
}

// listed notes that all objects of a feed are known, for whoever holds the lock, and ends wait once everything was listed.
func (t *tally) listed(f *feed) {
	f.flows()
	f.known = true
	select {
	case <-t.known:
	default:
		if t.podFeed.known && t.nodeFeed.known {
			close(t.known)
		}
	}
}

// flows notes that the objects of a feed are followed again.
func (t *tally) flows(f *feed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f.flows()
}

// fails notes that a request with this verb for the objects of a feed has failed.
func (t *tally) fails(f *feed, verb string, err error, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f.fails(verb, err, at)
}

// excuse begins anew to wait for what cannot be followed: the cluster is not healthy, which says enough.
func (t *tally) excuse() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range []*feed{&t.podFeed, &t.nodeFeed} {
		if !f.lost {
			f.since, f.why = time.Time{}, ""
		}
	}
}

// wait waits until everything was listed, limit at most.
func (t *tally) wait(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case <-t.known:
	case <-ctx.Done():
	}
}

// sum writes the sums into status, with models as spec.resourceModels, and takes out of it what cannot be counted any more. It returns
// why that is so. What has not been listed yet stays as it was.
func (t *tally) sum(status *clusterv1alpha1.ClusterStatus, models []clusterv1alpha1.ResourceModel, at time.Time) (reasons []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	noNodes, nodesPend := t.nodeFeed.look(at)
	noPods, podsPend := t.podFeed.look(at)
	var summary *clusterv1alpha1.NodeSummary
	resources := &clusterv1alpha1.ResourceSummary{}
	if noNodes == "" {
		summary, resources.Allocatable = t.offered()
	} else {
		reasons = append(reasons, "nodes cannot be counted: "+noNodes)
	}
	if noPods == "" {
		resources.Allocating, resources.Allocated = t.unbound.asks.list(t.unbound.pods), t.bound.asks.list(t.bound.pods)
	} else {
		reasons = append(reasons, "pods cannot be counted: "+noPods)
	}
	switch {
	case noNodes != "" && noPods != "":
		resources = nil
	case noNodes == "" && noPods == "":
		resources.AllocatableModelings = t.graded(models)
	}
	if !nodesPend {
		status.NodeSummary = summary
	}
	// An equal sum may be written in another way.
	if !nodesPend && !podsPend && !equality.Semantic.DeepEqual(status.ResourceSummary, resources) {
		status.ResourceSummary = resources
	}
	return reasons
}

// offered counts the nodes, and adds up what they offer.
func (t *tally) offered() (*clusterv1alpha1.NodeSummary, corev1.ResourceList) {
	nodes, offered := &clusterv1alpha1.NodeSummary{}, load{}
	for _, n := range t.nodes {
		nodes.TotalNum++
		if n.ready {
			nodes.ReadyNum++
		}
		offered.pods += n.pods
		offered.asks.add(n.offers, 1)
	}
	return nodes, offered.asks.list(offered.pods)
}

// graded counts the nodes of each grade by what their pods leave of them.
func (t *tally) graded(models []clusterv1alpha1.ResourceModel) []clusterv1alpha1.AllocatableModeling {
	steps := gradesOf(models)
	var counts []clusterv1alpha1.AllocatableModeling
	for _, step := range steps {
		counts = append(counts, clusterv1alpha1.AllocatableModeling{Grade: step.Grade})
	}
	for _, n := range t.nodes {
		if left, room := t.left(n); room {
			if grade := steps.of(left); grade >= 0 {
				counts[grade].Count++
			}
		}
	}
	return counts
}

// left returns what a node has to offer beside its pods, and whether it has room for one more pod.
func (t *tally) left(n node) (left amounts, room bool) {
	used := load{}
	if on := t.byNode[n.name]; on != nil {
		used = *on
	}
	// Whoever adds to an amount changes its map, and that of the node is to stay.
	left.add(n.offers, 1)
	left.add(used.asks, -1)
	return left, n.pods > used.pods
}
