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

// ensureNamespaces creates the namespaces that objects are about to be created in and that the bundle does not hold
// itself. If the bundle goes on after errors, a namespace that cannot be created is the failure of those objects alone.
func (p *applyRun) ensureNamespaces(ctx context.Context, decisions []decision) error {
	var mu sync.Mutex // guards failed
	failed := map[string]error{}
	work, limited := errgroup.WithContext(ctx)
	work.SetLimit(parallel)
	for _, name := range p.missingNamespaces(decisions) {
		work.Go(func() error {
			err := p.engine.member.ensureNamespace(limited, name)
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

// needsNamespace returns whether an object is about to be created in a namespace that may have to be created first.
func (v decision) needsNamespace() bool {
	return v.action == actionApply && v.existing == nil && v.resource.Namespaced && !v.skipNamespaceCreation
}

// missingNamespaces lists the namespaces that may have to be created, sorted.
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

// applyTarget carries out the decision about one target.
func (p *applyRun) applyTarget(ctx context.Context, v decision) (bundle.Action, error) {
	if v.action == actionReject {
		return bundle.Failed, v.err
	}
	now, err := p.applyOne(ctx, v)
	if apierrors.IsNotFound(err) {
		// The kind may have gone since the mapper looked.
		p.engine.member.mapper.Reset()
	}
	if now == nil {
		return bundle.Failed, err
	}
	p.hold(v, now)
	if err == nil && v.isCRD() && (v.existing == nil || v.existing.Version != now.Version || !p.isServed(v)) {
		p.addUnserved(v)
	}
	switch {
	case err != nil:
		return bundle.Failed, err
	case v.existing == nil:
		return bundle.Created, nil
	case v.existing.UID == now.UID && v.existing.Version == now.Version:
		return bundle.Unchanged, nil
	}
	return bundle.Configured, nil
}

// applyOne applies an object, in place of the old one if the bundle wants that and there is no other way.
func (p *applyRun) applyOne(ctx context.Context, v decision) (*live, error) {
	var uid types.UID
	if v.existing != nil {
		uid = v.existing.UID
	}
	if err := p.adoptFields(ctx, v); err != nil {
		return nil, err
	}
	now, err := p.request(ctx, v, uid)
	if apierrors.IsConflict(err) && uid != "" {
		now, err = p.applyAnew(ctx, v)
	}
	if apierrors.IsInvalid(err) && v.force && v.existing != nil && v.rank != rankCRD && v.rank != rankNamespace {
		return p.recreate(ctx, v, err)
	}
	if err != nil {
		return nil, err
	}
	if v.existing == nil && now.shared && !v.adopt && !now.IsAdopted() {
		// It did not exist when we looked, yet others have set fields: somebody made it in between.
		return p.adoptCreated(ctx, v, now)
	}
	return now, nil
}

// applyAnew applies an object that somebody deleted or replaced since we looked. What we make now has another UID than
// the record says.
func (p *applyRun) applyAnew(ctx context.Context, v decision) (*live, error) {
	if v.guarded && !v.overwrite {
		return nil, errReplaced
	}
	if err := p.blank(ctx, v); err != nil {
		return nil, err
	}
	return p.request(ctx, v, "")
}

// request sends the apply request, again and again for a while if the object's kind was defined only now.
func (p *applyRun) request(ctx context.Context, v decision, uid types.UID) (*live, error) {
	if uid != "" && v.retains() {
		return p.applyRetaining(ctx, v, uid)
	}
	body, err := v.stamped(v.adopt, uid)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	young := p.defined[v.ref.GVK().GroupKind()]
	p.mu.Unlock()
	if !young {
		return p.engine.member.apply(ctx, v.target, body)
	}
	var now *live
	var last error
	err = wait.PollUntilContextTimeout(ctx, pollInterval, establishLimit, true, func(ctx context.Context) (bool, error) {
		now, last = p.engine.member.apply(ctx, v.target, body)
		if apierrors.IsNotFound(last) && !missesNamespace(last) {
			return false, nil
		}
		return true, last
	})
	if wait.Interrupted(err) && last != nil {
		return nil, last
	}
	return now, err
}

// missesNamespace tells a missing namespace from a kind that is not served yet.
func missesNamespace(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

// hold puts an applied object into the record to come.
func (p *applyRun) hold(v decision, now *live) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next.Entries[v.key()] = inventory.Entry{Ref: v.ref, UID: now.UID, Fields: now.Fingerprint(), Adopted: now.IsAdopted(), Origin: v.origin}
}

// blank saves that the UID of an object is not known, before the object gets another one.
func (p *applyRun) blank(ctx context.Context, v decision) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next.Entries[v.key()] = inventory.Entry{Ref: v.ref, Adopted: v.adopt, Origin: v.origin}
	return p.save(ctx)
}

// recreate deletes an object that refused a change and creates it again. It returns the first error if the object
// would be refused as a new one too: then nothing is deleted.
func (p *applyRun) recreate(ctx context.Context, v decision, refused error) (*live, error) {
	if p.refusesNew(ctx, v) {
		return nil, refused
	}
	if err := p.blank(ctx, v); err != nil {
		return nil, err
	}
	old := objectLocation{key: v.key(), resource: v.resource}
	if err := p.engine.member.delete(ctx, old, v.existing.UID); err != nil {
		return nil, fmt.Errorf("delete it to create it again: %w", err)
	}
	if err := p.engine.member.awaitGone(ctx, old, v.existing.UID); err != nil {
		return nil, err
	}
	return p.request(ctx, v, "")
}

// refusesNew tries, without storing anything, whether the object under another name would be refused as invalid.
func (p *applyRun) refusesNew(ctx context.Context, v decision) bool {
	body, err := v.stamped(v.adopt, "")
	if err != nil {
		return true
	}
	var probe unstructured.Unstructured
	if err := json.Unmarshal(body, &probe); err != nil {
		return true
	}
	sum := sha256.Sum256([]byte(v.ref.String()))
	name := "towline-probe-" + hex.EncodeToString(sum[:10])
	probe.SetName(name)
	raw, err := probe.MarshalJSON()
	if err != nil {
		return true
	}
	force := true
	_, err = p.engine.member.at(v.resource, v.ref.Namespace).Patch(ctx, name, types.ApplyPatchType, raw,
		metav1.PatchOptions{FieldManager: kube.FieldManager, Force: &force, DryRun: []string{metav1.DryRunAll}})
	return apierrors.IsInvalid(err)
}
