package engine

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// trace returns rec, which has lost its inventory, with everything that is marked as deployed for its ID. It costs a list of every kind.
func (e *Engine) trace(ctx context.Context, rec *record) (*record, error) {
	found, err := e.member.traces(ctx, rec.ID)
	if err != nil {
		return nil, fmt.Errorf("look for what was deployed, without a record: %w", err)
	}
	traced := rec.edit()
	for _, item := range found {
		traced.inventory[item.Ref.Key()] = item
	}
	return traced, nil
}

// traces lists what is marked as deployed for id, in all kinds that the server has.
func (m *member) traces(ctx context.Context, id bundle.ID) ([]held, error) {
	served, err := discovery.ServerPreferredResources(m.served)
	if err != nil {
		// An API group that is away for a moment may hold something of ours.
		return nil, fmt.Errorf("list the kinds of the cluster: %w", err)
	}
	var mu sync.Mutex // guards found
	var found []held
	work, ctx := errgroup.WithContext(ctx)
	work.SetLimit(parallel)
	for _, group := range served {
		gv, err := schema.ParseGroupVersion(group.GroupVersion)
		if err != nil {
			return nil, fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		for _, resource := range group.APIResources {
			if strings.Contains(resource.Name, "/") || !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "delete") {
				continue
			}
			work.Go(func() error {
				items, err := m.tracesIn(ctx, gv.WithResource(resource.Name), gv.WithKind(resource.Kind), id)
				mu.Lock()
				defer mu.Unlock()
				found = append(found, items...)
				return err
			})
		}
	}
	return found, work.Wait()
}

func (m *member) tracesIn(ctx context.Context, gvr schema.GroupVersionResource, gvk schema.GroupVersionKind, id bundle.ID) ([]held, error) {
	var found []held
	opts := metav1.ListOptions{LabelSelector: kube.LabelReason + "=" + id.Feature, Limit: pageSize}
	for {
		page, err := m.objects.Resource(gvr).List(ctx, opts)
		if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsMethodNotSupported(err) {
			// What may not be listed was not deployed with this credential.
			return found, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", gvr.GroupResource(), err)
		}
		for i := range page.Items {
			if obj := &page.Items[i]; liveOf(obj).requestor() == id.String() {
				ref := kube.Ref{Group: gvk.Group, Version: gvk.Version, Kind: gvk.Kind, Namespace: obj.Namespace, Name: obj.Name}
				found = append(found, held{Ref: ref, UID: obj.UID})
			}
		}
		if page.Continue == "" {
			return found, nil
		}
		opts.Continue = page.Continue
	}
}
