package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/kube/logkeys"
)

// maxRebuilt is the maximum number of objects and pages that are read to rebuild an inventory. A cluster could return
// pages without end.
const maxRebuilt = 100_000

// maxRebuiltReleases is the maximum number of Helm releases in a rebuilt inventory.
const maxRebuiltReleases = 1000

// maxLogged is the maximum length of an error of discovery in the log, in bytes. It names each API that failed.
const maxLogged = 1 << 10

// rebuildInventory rebuilds the lost inventory of rec from the objects with the ownership labels of its ID. It lists
// every kind. With an error it returns the objects that it has found.
func (e *Engine) rebuildInventory(ctx context.Context, rec *inventory.Record) (*inventory.Record, error) {
	found, err := e.member.listMarked(ctx, rec.ID, e.ownerScope)
	rebuilt := rec.Edit()
	for _, entry := range found {
		rebuilt.Entries[entry.Ref.Key()] = entry
	}
	releases, releaseErr := e.rebuildReleases(ctx, rec.ID)
	rebuilt.Releases = releases
	if releaseErr != nil {
		releaseErr = &releaseRebuildError{err: releaseErr}
	}
	if err = errors.Join(err, releaseErr); err != nil {
		return rebuilt, fmt.Errorf("rebuild the inventory: %w", err)
	}
	return rebuilt, nil
}

// releaseRebuildError is the error if the Helm releases of a bundle could not be listed.
type releaseRebuildError struct{ err error }

// Error returns the reason.
func (e *releaseRebuildError) Error() string { return e.err.Error() }

// Unwrap returns the reason.
func (e *releaseRebuildError) Unwrap() error { return e.err }

// listMarked lists the objects with the ownership labels of id, in all kinds that can be listed. It logs and omits the
// other kinds, since one broken kind must not prevent finding all other objects.
func (m *memberClient) listMarked(ctx context.Context, id bundle.ID, ownerScope inventory.OwnerScope) ([]inventory.Entry, error) {
	served, err := m.discoveryClient.ServerPreferredResources()
	if err != nil {
		if !discovery.IsGroupDiscoveryFailedError(err) {
			return nil, fmt.Errorf("list the kinds of the cluster: %w", err)
		}
		log.FromContext(ctx).Info("rebuilding the inventory without the kinds that discovery does not return",
			logkeys.Bundle, id.String(), logkeys.Reason, kube.Truncate(err.Error(), maxLogged))
	}
	var mu sync.Mutex // guards found
	var found []inventory.Entry
	filter, limit := bundleFilter{id, ownerScope}, kube.NewObjectLimit(maxRebuilt, "objects")
	var work errgroup.Group
	work.SetLimit(maxConcurrent)
	for _, group := range served {
		gv, err := schema.ParseGroupVersion(group.GroupVersion)
		if err != nil {
			continue // no object can have an invalid version
		}
		for _, resource := range group.APIResources {
			if strings.Contains(resource.Name, "/") || !slices.Contains(resource.Verbs, "list") || !slices.Contains(resource.Verbs, "delete") {
				continue
			}
			work.Go(func() error {
				entries, err := m.listMarkedIn(ctx, gv.WithResource(resource.Name), gv.WithKind(resource.Kind), filter, limit)
				mu.Lock()
				defer mu.Unlock()
				found = append(found, entries...)
				return err
			})
		}
	}
	err = work.Wait()
	return found, err
}

func (m *memberClient) listMarkedIn(
	ctx context.Context, gvr schema.GroupVersionResource, gvk schema.GroupVersionKind, filter bundleFilter, limit *kube.ObjectLimit,
) ([]inventory.Entry, error) {
	var found []inventory.Entry
	selector := kube.LabelReason + "=" + filter.id.Feature
	err := kube.EachMetadata(ctx, m.metadataClient.Resource(gvr), selector, limit, func(object *metav1.PartialObjectMetadata) error {
		if !isAppliedFor(object, gvk.Group, filter) {
			return nil
		}
		entry := recoveredEntry(gvk, object)
		found = append(found, entry)
		return limit.Add(len(entry.Ref.Namespace) + len(entry.Ref.Name) + len(entry.Origin))
	})
	if isUnlistable(err) {
		log.FromContext(ctx).Info("rebuilding the inventory without a kind that cannot be listed",
			logkeys.Bundle, filter.id.String(), "kind", gvk.String(), logkeys.Reason, err.Error())
		return found, nil
	}
	if err != nil {
		return found, fmt.Errorf("list %s: %w", gvr.GroupResource(), err)
	}
	return found, nil
}

// recoveredEntry returns the entry of an object with our ownership labels.
func recoveredEntry(gvk schema.GroupVersionKind, obj *metav1.PartialObjectMetadata) inventory.Entry {
	existing := liveOf(obj)
	return inventory.Entry{
		Ref: kube.Ref{Group: gvk.Group, Version: gvk.Version, Kind: gvk.Kind, Namespace: obj.Namespace, Name: obj.Name},
		UID: existing.UID, Adopted: existing.IsAdopted(), Origin: existing.releaseOrigin(), Recovered: true,
	}
}

// bundleFilter selects the objects of one bundle of one scope.
type bundleFilter struct {
	id         bundle.ID
	ownerScope inventory.OwnerScope
}

// isUnlistable returns whether a list failed because of its kind: it is forbidden, or its API server or conversion
// webhook does not work.
func isUnlistable(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsMethodNotSupported(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err)
}

// isAppliedFor returns whether our own apply request, in this API group, applied obj for a bundle. The ownership labels
// are not sufficient: restores, operators and users copy them. An object that is served in several groups counts in the
// group in which it was applied.
func isAppliedFor(obj *metav1.PartialObjectMetadata, group string, filter bundleFilter) bool {
	if liveOf(obj).OwnerKey() != filter.ownerScope.OwnerKey(filter.id) || metav1.GetControllerOf(obj) != nil {
		return false
	}
	return slices.ContainsFunc(obj.ManagedFields, func(entry metav1.ManagedFieldsEntry) bool {
		gv, err := schema.ParseGroupVersion(entry.APIVersion)
		return err == nil && gv.Group == group && inventory.IsOwnApply(entry)
	})
}
