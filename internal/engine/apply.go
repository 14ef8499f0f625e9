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

// ensureNamespaces creates the namespaces that objects are about to be created in and that the bundle does not hold itself. If the bundle goes
// on after errors, a namespace that cannot be created is the failure of those objects alone.
func (p *pass) ensureNamespaces(ctx context.Context, verdicts []verdict) error {
	var mu sync.Mutex // guards failed
	failed := map[string]error{}
	work, limited := errgroup.WithContext(ctx)
	work.SetLimit(parallel)
	for _, name := range p.missingNamespaces(verdicts) {
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
	for i, v := range verdicts {
		if err := failed[v.ref.Namespace]; err != nil && v.needsNamespace() {
			verdicts[i].verb, verdicts[i].err = refuse, err
		}
	}
	return nil
}

// needsNamespace says whether an object is about to be created in a namespace that may have to be created first.
func (v verdict) needsNamespace() bool {
	return v.verb == write && v.seen == nil && v.resource.Namespaced && !v.skipNamespaceCreation
}

// missingNamespaces lists the namespaces that may have to be created, sorted.
func (p *pass) missingNamespaces(verdicts []verdict) []string {
	missing := map[string]bool{}
	for _, v := range verdicts {
		if v.needsNamespace() && !p.wanted[kube.Ref{Kind: "Namespace", Name: v.ref.Namespace}] {
			missing[v.ref.Namespace] = true
		}
	}
	for _, v := range verdicts {
		if v.seen != nil && v.resource.Namespaced {
			delete(missing, v.ref.Namespace)
		}
	}
	return slices.Sorted(maps.Keys(missing))
}

// writeOne makes one object right.
func (p *pass) writeOne(ctx context.Context, v verdict) (bundle.Action, error) {
	if v.verb == refuse {
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
	if err == nil && v.isCRD() && (v.seen == nil || v.seen.Version != now.Version) {
		p.addUnserved(v)
	}
	switch {
	case err != nil:
		return bundle.Failed, err
	case v.seen == nil:
		return bundle.Created, nil
	case v.seen.UID == now.UID && v.seen.Version == now.Version:
		return bundle.Unchanged, nil
	}
	return bundle.Configured, nil
}

// applyOne applies an object, in place of the old one if the bundle wants that and there is no other way.
func (p *pass) applyOne(ctx context.Context, v verdict) (*live, error) {
	var uid types.UID
	if v.seen != nil {
		uid = v.seen.UID
	}
	if err := p.adoptFields(ctx, v); err != nil {
		return nil, err
	}
	now, err := p.request(ctx, v, uid)
	if apierrors.IsConflict(err) && uid != "" {
		now, err = p.applyAnew(ctx, v)
	}
	if apierrors.IsInvalid(err) && v.force && v.seen != nil && v.rank != rankCRD && v.rank != rankNamespace {
		return p.recreate(ctx, v, err)
	}
	if err != nil {
		return nil, err
	}
	if v.seen == nil && now.shared && !v.adopt && !now.IsAdopted() {
		// It did not exist when we looked, yet others have set fields: somebody made it in between.
		return p.adoptCreated(ctx, v, now)
	}
	return now, nil
}

// applyAnew applies an object that somebody deleted or replaced since we looked. What we make now has another UID than the record says.
func (p *pass) applyAnew(ctx context.Context, v verdict) (*live, error) {
	if v.guarded && !v.overwrite {
		return nil, errReplaced
	}
	if err := p.blank(ctx, v); err != nil {
		return nil, err
	}
	return p.request(ctx, v, "")
}

// request sends the apply request, again and again for a while if the object's kind was defined only now.
func (p *pass) request(ctx context.Context, v verdict, uid types.UID) (*live, error) {
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
func (p *pass) hold(v verdict, now *live) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next.Entries[v.key()] = inventory.Entry{Ref: v.ref, UID: now.UID, Fields: now.Fingerprint(), Adopted: now.IsAdopted(), Origin: v.origin}
}

// blank saves that the UID of an object is not known, before the object gets another one.
func (p *pass) blank(ctx context.Context, v verdict) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.next.Entries[v.key()] = inventory.Entry{Ref: v.ref, Adopted: v.adopt, Origin: v.origin}
	return p.save(ctx)
}

// recreate deletes an object that refused a change and creates it anew. It gives the first error back if the object would be refused as a new
// one too: then nothing is deleted.
func (p *pass) recreate(ctx context.Context, v verdict, refused error) (*live, error) {
	if p.refusesNew(ctx, v) {
		return nil, refused
	}
	if err := p.blank(ctx, v); err != nil {
		return nil, err
	}
	old := spot{key: v.key(), resource: v.resource}
	if err := p.engine.member.delete(ctx, old, v.seen.UID); err != nil {
		return nil, fmt.Errorf("delete it to create it again: %w", err)
	}
	if err := p.engine.member.awaitGone(ctx, old, v.seen.UID); err != nil {
		return nil, err
	}
	return p.request(ctx, v, "")
}

// refusesNew tries, without storing anything, whether the object under another name would be refused as invalid.
func (p *pass) refusesNew(ctx context.Context, v verdict) bool {
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
