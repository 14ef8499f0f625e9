package survey

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
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
	// knowsPods and knowsNodes say that all of them were listed once; known is closed then.
	knowsPods, knowsNodes bool
	known                 chan struct{}
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
	t.knowsPods = true
	t.tellKnown()
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
	t.knowsNodes = true
	t.tellKnown()
}

// tellKnown ends wait once everything was listed.
func (t *tally) tellKnown() {
	select {
	case <-t.known:
	default:
		if t.knowsPods && t.knowsNodes {
			close(t.known)
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

// summarize returns the sums; ok is false until everything was listed.
func (t *tally) summarize(models []clusterv1alpha1.ResourceModel) (*clusterv1alpha1.NodeSummary, *clusterv1alpha1.ResourceSummary, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.knowsNodes || !t.knowsPods {
		return nil, nil, false
	}
	steps := gradesOf(models)
	counts := make([]int, len(steps))
	nodes := &clusterv1alpha1.NodeSummary{}
	var offered load
	for _, n := range t.nodes {
		nodes.TotalNum++
		if n.ready {
			nodes.ReadyNum++
		}
		offered.pods += n.pods
		offered.asks.add(n.offers, 1)
		if left, room := t.left(n); room {
			if grade := steps.of(left); grade >= 0 {
				counts[grade]++
			}
		}
	}
	resources := &clusterv1alpha1.ResourceSummary{
		Allocatable: offered.asks.list(offered.pods),
		Allocating:  t.unbound.asks.list(t.unbound.pods),
		Allocated:   t.bound.asks.list(t.bound.pods),
	}
	for i, step := range steps {
		resources.AllocatableModelings = append(resources.AllocatableModelings, clusterv1alpha1.AllocatableModeling{Grade: step.Grade, Count: counts[i]})
	}
	return nodes, resources, true
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
