// Package controllers runs one controller of the hub in a test, and counts its concurrent calls.
package controllers

import (
	"context"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/towline/towline/internal/kube"
)

// Start runs the controller that setup adds to the manager until the test ends. It reconciles the objects in namespaces
// only, so that several tests can share a hub.
func Start(t *testing.T, hub *rest.Config, setup func(context.Context, ctrl.Manager) error, namespaces ...string) {
	t.Helper()
	watched := map[string]cache.Config{}
	for _, namespace := range namespaces {
		watched[namespace] = cache.Config{}
	}
	mgr, err := ctrl.NewManager(hub, ctrl.Options{
		Scheme: kube.Scheme(), Cache: cache.Options{DefaultNamespaces: watched}, Metrics: server.Options{BindAddress: "0"}, Controller: config.Controller{
			SkipNameValidation: ptr.To(true),
			// The priority queue of controller-runtime 0.24.1 can deadlock if it shuts down while items are ready.
			UsePriorityQueue: ptr.To(false),
		},
	})
	if err == nil {
		err = setup(t.Context(), mgr)
	}
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- mgr.Start(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// Concurrency counts calls that run at the same time.
type Concurrency struct{ running, most atomic.Int32 }

// Begin counts a call until its end. The caller must call end.
func (c *Concurrency) Begin() (end func()) {
	running := c.running.Add(1)
	for {
		if most := c.most.Load(); running <= most || c.most.CompareAndSwap(most, running) {
			return func() { c.running.Add(-1) }
		}
	}
}

// Running returns how many calls are running.
func (c *Concurrency) Running() int { return int(c.running.Load()) }

// Most returns how many calls have run at the same time.
func (c *Concurrency) Most() int { return int(c.most.Load()) }
