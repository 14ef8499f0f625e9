package engine_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/inventory"
)

// shards has the process that serves each partition. The partition of a bundle is the suffix of its name.
type shards struct {
	mu       sync.Mutex // guards servedBy
	servedBy map[string]string
}

// move moves a partition from one engine to another one.
func (s *shards) move(t *testing.T, partition string, from *engine.Engine, process string) {
	t.Helper()
	s.mu.Lock()
	s.servedBy[partition] = process
	s.mu.Unlock()
	from.StopServing(partition)
}

func (s *shards) engineOf(process string) func(*engine.Options) {
	isServed := func(partition string) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.servedBy[partition] == process
	}
	return func(o *engine.Options) {
		o.Scope = inventory.LocalScope().Registration
		o.Partitions = &inventory.Partitions{
			Of: func(id bundle.ID) string { return id.RequestorName[strings.LastIndex(id.RequestorName, "-")+1:] },
			ListAssigned: func(context.Context) (all []string, err error) {
				for _, partition := range []string{"moving", "staying"} {
					if isServed(partition) {
						all = append(all, partition)
					}
				}
				return all, nil
			},
			IsAssigned: func(_ context.Context, partition string) (bool, error) { return isServed(partition), nil },
		}
	}
}

func serve(t *testing.T, e *engine.Engine, partition string) {
	t.Helper()
	if _, err := e.Serve(t.Context(), partition); err != nil {
		t.Fatal(err)
	}
}

// TestMovedPartitionIsCorrectedByOneEngine moves a partition between two running engines. An object of the partition
// changes while no engine serves it.
func TestMovedPartitionIsCorrectedByOneEngine(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	s := &shards{servedBy: map[string]string{"moving": "a", "staying": "b"}}
	a, b := c.runEngine(t, nil, s.engineOf("a")), c.runEngine(t, nil, s.engineOf("b"))
	serve(t, a.Engine, "moving")
	serve(t, b.Engine, "staying")
	converge(t, a.Engine, c.bundle("moving", c.configMap("moved", "1")))
	converge(t, b.Engine, c.bundle("staying", c.configMap("stayed", "1")))
	corrected := func(name string) {
		t.Helper()
		c.patch(configMaps, name, `{"data":{"key":"2"}}`)
		eventually(t, name+" is corrected", func() bool { return c.value(name) == "1" })
	}
	corrected("moved")
	corrected("stayed") // b watches ConfigMaps

	for _, to := range []struct {
		former, next *runningEngine
		name         string
	}{{a, b, "b"}, {b, a, "a"}} {
		s.move(t, "moving", to.former.Engine, to.name)
		c.patch(configMaps, "moved", `{"data":{"key":"2"}}`)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) { return c.value("moved") != "2", nil })
		cancel()
		if err == nil {
			t.Errorf("moved to %s: the former engine corrects", to.name)
		}
		if _, err := to.former.Serve(t.Context(), "moving"); !errors.Is(err, inventory.ErrNotServed) {
			t.Errorf("moved to %s: the former engine serves it: %v", to.name, err)
		}
		serve(t, to.next.Engine, "moving")
		if listed, err := to.next.ListPartition(t.Context(), "moving"); err != nil || len(listed) != 1 {
			t.Errorf("moved to %s: got %v, %v", to.name, listed, err)
		}
		eventually(t, "the next engine corrects", func() bool { return c.value("moved") == "1" })
		corrected("moved")
	}
	withdraw(t, a.Engine, bundle.Withdrawal{ID: c.bundle("moving").ID})
	if listed, err := a.ListPartition(t.Context(), "moving"); err != nil || len(listed) != 0 {
		t.Errorf("after the withdrawal: got %v, %v", listed, err)
	}
}

// TestReturnedPartitionHasNoFormerFailure moves a partition away and back after a run has failed.
func TestReturnedPartitionHasNoFormerFailure(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	s := &shards{servedBy: map[string]string{"moving": "a"}}
	a := c.runEngine(t, nil, s.engineOf("a"))
	serve(t, a.Engine, "moving")
	immutable := c.configMap("immutable", "2")
	if err := unstructured.SetNestedField(immutable.Object, true, "immutable"); err != nil {
		t.Fatal(err)
	}
	c.create(configMaps, immutable)
	want := c.bundle("moving", c.configMap("immutable", "1"))
	eventually(t, "Run runs", func() bool {
		_, err := a.Converge(t.Context(), want)
		_, isTerminal := errors.AsType[*bundle.TerminalError](err)
		return isTerminal
	})
	if err := c.objects.Resource(configMaps).Namespace(c.ns).Delete(t.Context(), "immutable", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.move(t, "moving", a.Engine, "b")
	s.move(t, "moving", a.Engine, "a")
	serve(t, a.Engine, "moving")
	converge(t, a.Engine, want)
}

// TestReleasedPartitionIsReadFromTheCluster reads the record of a bundle whose partition has moved away.
func TestReleasedPartitionIsReadFromTheCluster(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	s := &shards{servedBy: map[string]string{"moving": "a"}}
	a := c.engine(nil, s.engineOf("a"))
	serve(t, a, "moving")
	converge(t, a, c.bundle("moving", c.configMap("moved", "1")))
	s.move(t, "moving", a, "b")
	if _, ok, err := a.FindDeployed(t.Context(), c.bundle("moving").ID); !ok || err != nil {
		t.Errorf("got %t, %v; want the record on the cluster", ok, err)
	}
	if _, err := a.ListPartition(t.Context(), "moving"); !errors.Is(err, inventory.ErrNotServed) {
		t.Errorf("ListPartition: got %v", err)
	}
}
