package resources

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	kubejson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

var errNotInformed = errors.New("the informer does not have the object yet")

var (
	errTooManyKinds            = fmt.Errorf("templates already refer to %d other kinds of objects", maxKinds)
	errTooManyKindsOfNamespace = fmt.Errorf("the templates of Profiles in this namespace already refer to %d other kinds of objects", maxKindsOfNamespace)
)

// version is one version of an object. It is empty if the object does not exist.
type version struct {
	// content is the JSON of the object without managedFields.
	content         json.RawMessage
	resourceVersion string
	// secretType is the type of a Secret, "" for other objects.
	secretType corev1.SecretType
}

// pin is the version that Load returns for a reference, with the digest of its relevant fields.
type pin struct {
	version

	digest string
}

// Load returns the objects that a summary refers to, and watches them until Forget or the next Load for the summary. It
// must be called only in the reconcile of the summary. Errors name the identifier of the reference. They wrap
// source.ErrNotFound if an object does not exist and is not optional, and are phase.TerminalError if only the user can
// correct them.
func (w *Watcher) Load(ctx context.Context, summary types.NamespacedName, refs []configv1beta1.TemplateResourceRef, tmplCtx source.TemplateContext) (source.Resources, error) {
	resolved, err := w.resolveAll(refs, tmplCtx)
	if err != nil {
		// The summary keeps its former references. The error is corrected by a change of the spec or of the cluster, and both
		// trigger a reconcile.
		return source.Resources{}, err
	}
	// The watch begins before the objects are read, so that no change is missed.
	w.setReferences(summary, summaryReferences{namespace: tmplCtx.RestrictedNamespace, all: resolved})
	return collect(refs, resolved, tmplCtx, func(reference source.ResourceReference) (pin, error) { return w.readPinned(ctx, reference) })
}

// Read returns the same objects and errors as Load, but does not change the references of the summary. It is for
// callers outside of the reconcile of the summary: their spec or cluster can be old, or the summary can be deleted.
func (w *Watcher) Read(ctx context.Context, refs []configv1beta1.TemplateResourceRef, tmplCtx source.TemplateContext) (source.Resources, error) {
	resolved, err := w.resolveAll(refs, tmplCtx)
	if err != nil {
		return source.Resources{}, err
	}
	return collect(refs, resolved, tmplCtx, func(reference source.ResourceReference) (pin, error) { return w.readUnwatched(ctx, reference) })
}

func (w *Watcher) resolveAll(refs []configv1beta1.TemplateResourceRef, tmplCtx source.TemplateContext) ([]source.ResourceReference, error) {
	resolved := make([]source.ResourceReference, 0, len(refs))
	for _, ref := range refs {
		reference, err := w.resolve(ref, tmplCtx)
		if err != nil {
			return nil, fmt.Errorf("templateResourceRefs %s: %w", ref.Identifier, err)
		}
		resolved = append(resolved, reference)
	}
	return resolved, nil
}

// collect reads the objects of refs. resolved has the resolved reference of each.
func collect(
	refs []configv1beta1.TemplateResourceRef, resolved []source.ResourceReference, tmplCtx source.TemplateContext, read func(source.ResourceReference) (pin, error),
) (source.Resources, error) {
	loaded := source.Resources{Objects: map[string]json.RawMessage{}}
	sum := sha256.New()
	size := 0
	for i, ref := range refs {
		pinned, err := read(resolved[i])
		if errors.Is(err, source.ErrNotFound) && ref.Optional {
			pinned, err = pin{}, nil
		}
		if err == nil {
			err = checkAllowed(resolved[i], pinned, tmplCtx, ref.Optional)
		}
		if err != nil {
			return source.Resources{}, fmt.Errorf("templateResourceRefs %s: %w", ref.Identifier, err)
		}
		if pinned.content == nil {
			loaded.Absent = append(loaded.Absent, ref.Identifier)
		} else {
			loaded.Objects[ref.Identifier] = pinned.content
		}
		loaded.HasSecret = loaded.HasSecret || isSecret(resolved[i])
		if size += len(pinned.content); size > source.MaxResourcesSize {
			return source.Resources{}, phase.TerminalErrorf("templateResourceRefs: the objects have more than %d MiB", source.MaxResourcesSize>>20)
		}
		// Each part is quoted, so that different references have different texts.
		_, _ = fmt.Fprintf(sum, "%q %q %q\n", ref.Identifier, fmt.Sprint(resolved[i]), []string{resolved[i].WatchFields, strconv.FormatBool(resolved[i].IgnoreStatus), fmt.Sprintf("%x", sha256.Sum256(pinned.content))})
	}
	if len(refs) > 0 {
		loaded.Digest = hex.EncodeToString(sum.Sum(nil))
	}
	return loaded, nil
}

// Forget ends the watch of the objects of a summary.
func (w *Watcher) Forget(summary types.NamespacedName) { w.setReferences(summary, summaryReferences{}) }

// resolve expands the templates of a reference. The namespace is empty for a cluster-scoped kind.
func (w *Watcher) resolve(ref configv1beta1.TemplateResourceRef, tmplCtx source.TemplateContext) (source.ResourceReference, error) {
	reference, err := source.ResolveResource(ref, tmplCtx)
	if err != nil {
		return source.ResourceReference{}, err
	}
	gvk := keyOf(reference).gvk
	if meta.IsNoMatchError(w.kindError(gvk)) {
		return reference, nil // readPinned returns the error
	}
	mapping, err := w.live.RESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		return reference, nil // the function that reads the object returns the error
	}
	if err != nil {
		return source.ResourceReference{}, fmt.Errorf("find the kind of %s: %w", reference, err)
	}
	if mapping.Scope.Name() != meta.RESTScopeNameRoot {
		return reference, nil
	}
	reference.Namespace = ""
	if tmplCtx.RestrictedNamespace != "" {
		return source.ResourceReference{}, phase.TerminalErrorf("%s has no namespace: a Profile reads its own namespace %s only", reference, tmplCtx.RestrictedNamespace)
	}
	return reference, nil
}

// kindError returns the error of the last attempt to watch a kind, nil if it was watched or not tried yet.
func (w *Watcher) kindError(gvk schema.GroupVersionKind) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kindErrors[gvk]
}

// noKindError returns the error for an object whose kind the API server does not serve.
func noKindError(key objectKey, reference source.ResourceReference) error {
	return fmt.Errorf("%s: the hub has no kind %s in %s: it %w", reference, key.gvk.Kind, key.gvk.GroupVersion(), source.ErrNotFound)
}

func isSecret(reference source.ResourceReference) bool {
	return keyOf(reference).gvk.GroupKind() == schema.GroupKind{Kind: "Secret"}
}

// checkAllowed returns an error for an object that does not exist and is not optional, and for a Secret that a Profile
// must not read: the namespace also has Secrets with kubeconfigs and tokens of clusters, which authors of Profiles may
// not be allowed to read.
func checkAllowed(reference source.ResourceReference, pinned pin, tmplCtx source.TemplateContext, isOptional bool) error {
	if pinned.content == nil && !isOptional {
		return fmt.Errorf("%s %w", reference, source.ErrNotFound)
	}
	if tmplCtx.RestrictedNamespace != "" && isSecret(reference) && pinned.content != nil && pinned.secretType != libv1beta1.ProfileSecretType {
		return phase.TerminalErrorf("%s: its type is %q, but a Profile reads only Secrets of type %q", reference, pinned.secretType, libv1beta1.ProfileSecretType)
	}
	return nil
}

// readPinned returns the pin of a reference, which setReferences must have added. If the reference has no pin, it pins
// the last version of the object, and reads the object first if it was never read.
func (w *Watcher) readPinned(ctx context.Context, reference source.ResourceReference) (pin, error) {
	key := keyOf(reference)
	w.mu.Lock()
	watched := w.objects[key]
	w.mu.Unlock()
	kindErr := w.kindError(key.gvk)
	if watched == nil {
		return pin{}, fmt.Errorf("read %s: the summary has another reference now", reference)
	}
	if meta.IsNoMatchError(kindErr) {
		return pin{}, noKindError(key, reference)
	}
	if kindErr != nil {
		return pin{}, fmt.Errorf("watch %s: %w", reference, kindErr)
	}
	watched.readMu.Lock()
	defer watched.readMu.Unlock()
	if pinned, isRead := w.pinOf(watched, reference); isRead {
		return pinned, nil
	}
	if !w.isRead(watched) {
		latest, err := w.readLive(ctx, key, reference)
		if err != nil {
			return pin{}, err
		}
		w.storeVersion(watched, latest)
		w.objectQueue.AddAfter(key, minReadInterval) // refresh compares it with the informer
	}
	return w.addPin(watched, reference)
}

// readUnwatched returns the pin of a reference, also if no summary has the reference. Without a pin it reads the object
// and stores nothing.
func (w *Watcher) readUnwatched(ctx context.Context, reference source.ResourceReference) (pin, error) {
	key := keyOf(reference)
	w.mu.Lock()
	watched := w.objects[key]
	w.mu.Unlock()
	if watched != nil {
		if pinned, isRead := w.pinOf(watched, reference); isRead {
			return pinned, nil
		}
	}
	latest, err := w.readLive(ctx, key, reference)
	return pin{version: latest}, err
}

func (w *Watcher) pinOf(watched *watchedObject, reference source.ResourceReference) (pin, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	pinned, ok := watched.pins[reference]
	return pinned, ok
}

func (w *Watcher) isRead(watched *watchedObject) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return watched.isRead
}

func (w *Watcher) storeVersion(watched *watchedObject, latest version) {
	w.mu.Lock()
	defer w.mu.Unlock()
	watched.isRead, watched.latest, watched.readAt = true, latest, time.Now()
}

// addPin pins a reference to the last version that was read.
func (w *Watcher) addPin(watched *watchedObject, reference source.ResourceReference) (pin, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	digest, err := digestOf(reference, watched.latest)
	if err != nil {
		return pin{}, err
	}
	pinned := pin{version: watched.latest, digest: digest}
	watched.pins[reference] = pinned
	return pinned, nil
}

func digestOf(reference source.ResourceReference, latest version) (string, error) {
	if latest.content == nil {
		return reference.Digest(nil)
	}
	var content map[string]any
	if err := kubejson.Unmarshal(latest.content, &content); err != nil {
		return "", fmt.Errorf("decode %s: %w", reference, err)
	}
	return reference.Digest(content)
}

// readLive reads an object from the API server. It returns an empty version if the object does not exist, and an error
// that wraps source.ErrNotFound if the API server does not serve the kind.
func (w *Watcher) readLive(ctx context.Context, key objectKey, reference source.ResourceReference) (version, error) {
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(key.gvk)
	err := w.live.Get(ctx, client.ObjectKey{Namespace: key.namespace, Name: key.name}, object)
	switch {
	case meta.IsNoMatchError(err):
		return version{}, noKindError(key, reference)
	case apierrors.IsNotFound(err):
		return version{}, nil
	case err != nil:
		return version{}, fmt.Errorf("read %s: %w", reference, err)
	}
	object.SetManagedFields(nil)
	content, err := json.Marshal(object.Object)
	if err != nil {
		return version{}, fmt.Errorf("encode %s: %w", reference, err)
	}
	read := version{content: content, resourceVersion: object.GetResourceVersion()}
	if isSecret(reference) {
		secretType, _, _ := unstructured.NestedString(object.Object, "type")
		read.secretType = corev1.SecretType(secretType)
	}
	return read, nil
}

// refresh handles an event of an object. It reads the object again, unless the informer has the version that was read
// last, and enqueues the summaries whose relevant fields have changed. While the object exists and the informer does
// not have it, refresh returns an error and is retried: no event reports the deletion of an object that the informer
// never had.
func (w *Watcher) refresh(ctx context.Context, key objectKey) error {
	w.mu.Lock()
	watched, latest := w.objects[key], version{}
	isRead := watched != nil && watched.isRead
	if isRead {
		latest = watched.latest
	}
	w.mu.Unlock()
	if watched == nil {
		return nil
	}
	cachedVersion, err := w.getCachedVersion(ctx, key)
	if err != nil || isRead && cachedVersion == latest.resourceVersion {
		return err
	}
	changed, err := w.readAgain(ctx, key, watched)
	if err != nil {
		return err
	}
	w.enqueue(ctx, changed)
	w.mu.Lock()
	defer w.mu.Unlock()
	if watched.latest.content != nil && cachedVersion == "" {
		return errNotInformed
	}
	return nil
}

// getCachedVersion returns the resourceVersion of an object in the informer of its kind, "" if it is not there.
func (w *Watcher) getCachedVersion(ctx context.Context, key objectKey) (string, error) {
	informers := w.kindCache
	if isHubCached(key.gvk) {
		informers = w.contentCache
	}
	object := metadataOf(key.gvk)
	// With a canceled context, Get does not wait for the first list of the informer: the objects of a kind whose list
	// takes long would otherwise occupy all workers.
	withoutWait, cancel := context.WithCancel(ctx)
	cancel()
	err := informers.Get(withoutWait, client.ObjectKey{Namespace: key.namespace, Name: key.name}, object, client.UnsafeDisableDeepCopy)
	if _, isMissing := errors.AsType[*cache.ErrResourceNotCached](err); isMissing || apierrors.IsNotFound(err) {
		return "", nil
	}
	return object.ResourceVersion, err
}

// readAgain reads an object, stores its version, and returns the summaries whose relevant fields have changed.
func (w *Watcher) readAgain(ctx context.Context, key objectKey, watched *watchedObject) (map[types.NamespacedName]struct{}, error) {
	watched.readMu.Lock()
	defer watched.readMu.Unlock()
	reference := source.ResourceReference{APIVersion: key.gvk.GroupVersion().String(), Kind: key.gvk.Kind, Namespace: key.namespace, Name: key.name}
	latest, err := w.readLive(ctx, key, reference)
	if errors.Is(err, source.ErrNotFound) {
		latest, err = version{}, nil // the kind was deleted with its objects
	}
	if err != nil {
		return nil, err
	}
	return w.updateVersion(watched, latest)
}

// updateVersion stores a version of an object, updates the pins, and returns the summaries whose relevant fields have
// changed, or whose reference has no pin yet.
func (w *Watcher) updateVersion(watched *watchedObject, latest version) (map[types.NamespacedName]struct{}, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed := map[types.NamespacedName]struct{}{}
	for reference, summaries := range watched.summaries {
		digest, err := digestOf(reference, latest)
		if err != nil {
			return nil, err
		}
		pinned, ok := watched.pins[reference]
		if ok && pinned.digest == digest {
			continue
		}
		if ok {
			watched.pins[reference] = pin{version: latest, digest: digest}
		}
		for summary := range summaries {
			changed[summary] = struct{}{}
		}
	}
	watched.isRead, watched.latest, watched.readAt = true, latest, time.Now()
	return changed, nil
}
