package controlplane

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/kubernetes/pkg/controller/namespace/deletion"
)

const (
	// namespaceDeletionDelay is the time in which earlier requests to create objects in a deleted namespace end. Upstream
	// waits 5 s, for other API servers.
	namespaceDeletionDelay = 500 * time.Millisecond
	// maxNamespaceRetry is the longest time until a namespace with remaining objects is tried again. Upstream waits up to
	// 16 s for pods that end at once here.
	maxNamespaceRetry = 10 * time.Second
)

// addNamespaces adds upstream's deletion of the objects in deleted namespaces, with shorter delays.
func (c *controllers) addNamespaces(ctx context.Context) error {
	deleter := deletion.NewNamespacedResourcesDeleter(ctx, c.client.CoreV1().Namespaces(), c.metadata, c.client.CoreV1(),
		c.client.Discovery().ServerPreferredNamespacedResources, v1.FinalizerKubernetes)
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](namespaceDeletionDelay, maxNamespaceRetry))
	enqueue := func(obj any) {
		if namespace := obj.(*v1.Namespace); namespace.DeletionTimestamp != nil {
			queue.AddAfter(namespace.Name, namespaceDeletionDelay)
		}
	}
	_, err := c.informers.Core().V1().Namespaces().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: enqueue, UpdateFunc: func(_, obj any) { enqueue(obj) },
	})
	if err != nil {
		return err
	}
	c.addWorkers(func(ctx context.Context, workers int) {
		for range workers {
			go func() {
				for deleteObjects(ctx, deleter, queue) {
				}
			}()
		}
		<-ctx.Done()
		queue.ShutDown()
	})
	return nil
}

// deleteObjects deletes the objects in the next namespace of the queue. It returns false at the end of the queue.
func deleteObjects(ctx context.Context, deleter deletion.NamespacedResourcesDeleterInterface, queue workqueue.TypedRateLimitingInterface[string]) bool {
	name, isEnd := queue.Get()
	if isEnd {
		return false
	}
	defer queue.Done(name)
	if err := deleter.Delete(ctx, name); err != nil { // also if objects remain
		queue.AddRateLimited(name)
		return true
	}
	queue.Forget(name)
	return true
}
