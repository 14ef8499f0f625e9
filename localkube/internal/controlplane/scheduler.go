package controlplane

import (
	"context"
	"fmt"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/events"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/profile"
)

// startScheduler runs the upstream scheduler with its default profile until ctx ends.
func startScheduler(ctx context.Context, client kubernetes.Interface) error {
	informers := scheduler.NewInformerFactory(client, 0)
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	sched, err := scheduler.New(ctx, client, informers, nil, profile.NewRecorderFactory(broadcaster))
	if err != nil {
		return fmt.Errorf("build scheduler: %w", err)
	}
	broadcaster.StartRecordingToSink(ctx.Done())
	informers.Start(ctx.Done())
	go func() {
		informers.WaitForCacheSync(ctx.Done())
		// The only error is the end of ctx, on which Run returns at once.
		if err := sched.WaitForHandlersSync(ctx); err == nil {
			sched.Run(ctx)
		}
	}()
	return nil
}
