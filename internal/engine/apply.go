package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

// ensureNamespaces creates the missing namespaces of objects to create, except namespaces that are in the bundle. With
// ContinueOnError, a namespace that cannot be created fails only the objects in it.
func (p *applyRun) ensureNamespaces(ctx context.Context, decisions []decision) error {
	var mu sync.Mutex // guards failed
	failed := map[string]error{}
	work, limited := errgroup.WithContext(ctx)
	work.SetLimit(maxConcurrent)
	for _, name := range p.missingNamespaces(decisions) {
		work.Go(func() error {
			err := p.engine.member.ensureNamespace(withAccount(limited, p.bundle.Options.ServiceAccount), name)
			if err == nil {
				return nil
			}
			err = fmt.Errorf("create namespace %s: %w", name, err)
			if !p.bundle.Options.ContinueOnError {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			failed[name] = err
			return nil
		})
	}
	if err := work.Wait(); err != nil {
		return err
	}
	for i, v := range decisions {
		if err := failed[v.ref.Namespace]; err != nil && v.needsNamespace() {
			decisions[i].action, decisions[i].err = actionReject, err
		}
	}
	return nil
}

// needsNamespace returns whether an object must be created in a namespace that may not exist.
func (v decision) needsNamespace() bool {
	return v.action == actionApply && v.existing == nil && v.resource.Namespaced && !v.skipNamespaceCreation
}

// missingNamespaces lists the namespaces that may not exist, sorted. A namespace with an existing object exists.
func (p *applyRun) missingNamespaces(decisions []decision) []string {
	missing := map[string]bool{}
	for _, v := range decisions {
		if v.needsNamespace() && !p.desired[kube.Ref{Kind: "Namespace", Name: v.ref.Namespace}] {
			missing[v.ref.Namespace] = true
		}
	}
	for _, v := range decisions {
		if v.existing != nil && v.resource.Namespaced {
			delete(missing, v.ref.Namespace)
		}
	}
	return slices.Sorted(maps.Keys(missing))
}

// executeDecision applies or rejects one target, and records the applied object in the next inventory.
func (p *applyRun) executeDecision(ctx context.Context, v decision) (bundle.Action, error) {
	if v.action == actionReject {
		return bundle.Failed, v.err
	}
	ctx = withAccount(ctx, p.bundle.Options.ServiceAccount)
	applied, created, err := p.applyObject(ctx, v)
	if err != nil {
		if apierrors.IsNotFound(err) {
			// The kind may no longer be served.
			p.engine.member.mapper.Reset()
		}
		return bundle.Failed, p.asRefused(v, err)
	}
	if v.isCRD() && (v.existing == nil || v.existing.Version != applied.Version || !p.isServed(v)) {
		p.addUnserved(v)
	}
	version, err := p.applySubresources(ctx, v, applied, created)
	if err != nil {
		p.setEntry(v, applied, "")
		return bundle.Failed, p.asRefused(v, err)
	}
	p.setEntry(v, applied, applied.Fingerprint())
	switch {
	case v.existing == nil:
		return bundle.Created, nil
	case v.existing.UID == applied.UID && v.existing.Version == version:
		return bundle.Unchanged, nil
	}
	return bundle.Configured, nil
}

// applyObject applies an object, and returns whether it has created it. If the API server refuses the change as invalid
// and the target has the option force, it deletes the object and creates it again. It never does so with a Namespace or
// a CustomResourceDefinition.
func (p *applyRun) applyObject(ctx context.Context, v decision) (applied *live, created bool, err error) {
	if v.existing == nil {
		return p.createObject(ctx, v)
	}
	if err := p.adoptFields(ctx, v); err != nil {
		return nil, false, err
	}
	applied, err = p.requestApply(ctx, v, v.existing.UID)
	if apierrors.IsConflict(err) {
		applied, created, err = p.applyReplaced(ctx, v)
	}
	if apierrors.IsInvalid(err) && v.force && v.rank != rankCRD && v.rank != rankNamespace {
		return p.recreate(ctx, v, err)
	}
	return applied, created, err
}

// applyReplaced applies an object that was deleted or replaced after it was read. It clears the UID in the inventory
// first, since the new object has another one.
func (p *applyRun) applyReplaced(ctx context.Context, v decision) (applied *live, created bool, err error) {
	if v.rejectUnmanaged && !v.overwrite {
		return nil, false, errReplaced
	}
	if err := p.clearUID(ctx, v); err != nil {
		return nil, false, err
	}
	return p.createObject(ctx, v)
}

// requestApply sends the apply request. With a uid, it changes the object with this UID, and leaves the excluded fields
// alone. Without a uid, it creates the object. If this run has defined the kind, it retries for establishTimeout until
// the kind is served.
func (p *applyRun) requestApply(ctx context.Context, v decision, uid types.UID) (*live, error) {
	send := func(ctx context.Context, t *target, resourceVersion string) (*live, error) {
		body := t.body(v.adopt, uid)
		if resourceVersion != "" {
			mapOf(body["metadata"])["resourceVersion"] = resourceVersion
		}
		raw, err := encodeBody(t.ref, body)
		if err != nil {
			return nil, err
		}
		return p.engine.member.apply(ctx, t, raw, uid)
	}
	if uid != "" && len(v.excluded) > 0 {
		return p.sendRetaining(ctx, v, uid, send)
	}
	p.mu.Lock()
	isNew := p.defined[v.ref.GVK().GroupKind()]
	p.mu.Unlock()
	if !isNew {
		return send(ctx, v.target, "")
	}
	var applied *live
	var last error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, establishTimeout, true, func(ctx context.Context) (bool, error) {
		applied, last = send(ctx, v.target, "")
		if apierrors.IsNotFound(last) && !isNamespaceMissing(last) {
			return false, nil
		}
		return true, last
	})
	if wait.Interrupted(err) && last != nil {
		return nil, last
	}
	return applied, err
}

// isNamespaceMissing returns whether a NotFound error is about the namespace, and not about a kind that is not served
// yet.
func isNamespaceMissing(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

// setEntry sets the entry of an applied object in the next inventory. Without a fingerprint, the next run applies the
// object again. The entry is Recovered if the prior entry for the same UID does not prove that the bundle applied the
// object.
func (p *applyRun) setEntry(v decision, applied *live, fingerprint string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	prior := p.prior.Entries[v.key()]
	p.next.Entries[v.key()] = inventory.Entry{
		Ref: v.ref, UID: applied.UID, Fingerprint: fingerprint, Adopted: applied.IsAdopted(), Origin: v.origin, Recovered: prior.UID == applied.UID && !prior.IsProvenApplied(),
	}
}

// clearUID saves the entry of an object without a UID, before the object is created again and gets another one.
func (p *applyRun) clearUID(ctx context.Context, v decision) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next.Entries[v.key()] = inventory.Entry{Ref: v.ref, Adopted: v.adopt, Origin: v.origin}
	return p.save(ctx)
}

// recreate deletes an object and creates it again after the API server refused to change it. It deletes nothing and
// returns refused if the server would also refuse to create it.
func (p *applyRun) recreate(ctx context.Context, v decision, refused error) (applied *live, created bool, err error) {
	if p.isCreationRefused(ctx, v) {
		return nil, false, refused
	}
	if err := p.clearUID(ctx, v); err != nil {
		return nil, false, err
	}
	old := objectLocation{key: v.key(), resource: v.resource}
	if err := p.engine.member.delete(ctx, old, v.existing.UID); err != nil {
		return nil, false, fmt.Errorf("delete it to create it again: %w", err)
	}
	if err := p.engine.member.awaitDeleted(ctx, old, v.existing.UID); err != nil {
		return nil, false, err
	}
	return p.createObject(ctx, v)
}

// isCreationRefused returns whether the API server would refuse to create the object. It sends a dry run with another
// name, because with the name of the existing object it would be an update.
func (p *applyRun) isCreationRefused(ctx context.Context, v decision) bool {
	raw, err := encodeBody(v.ref, v.body(v.adopt, ""))
	if err != nil {
		return true
	}
	var probe unstructured.Unstructured
	if err := json.Unmarshal(raw, &probe); err != nil {
		return true
	}
	sum := sha256.Sum256([]byte(v.ref.String()))
	name := "towline-probe-" + hex.EncodeToString(sum[:10])
	probe.SetName(name)
	if raw, err = probe.MarshalJSON(); err != nil {
		return true
	}
	force := true
	_, err = p.engine.member.metadataAt(v.resource, v.ref.Namespace).Patch(ctx, name, types.ApplyPatchType, raw,
		metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force, DryRun: []string{metav1.DryRunAll}})
	return apierrors.IsInvalid(err)
}
