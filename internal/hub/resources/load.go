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

// version is one version of an object.
type version struct {
	// content is the JSON of the object without managedFields, nil if it does not exist.
	content         json.RawMessage
	resourceVersion string
	// secretType is the type of a Secret.
	secretType corev1.SecretType
}

// pin is the version that a reference sees, with the digest of what counts for the reference.
type pin struct {
	version

	digest string
}

// Load returns the objects that a summary refers to, and watches them until Forget or the next call of Load for the
// summary. It must be called only in the reconcile of the summary. Errors name the identifier. They wrap
// source.ErrNotFound for an object that does not exist and is not optional, and are phase.Invalid if only the user can
// correct them.
func (w *Watcher) Load(ctx context.Context, summary types.NamespacedName, refs []configv1beta1.TemplateResourceRef, subject source.Subject) (source.Resources, error) {
	resolved, err := w.resolveAll(refs, subject)
	if err != nil {
		// The summary keeps its former references: a change of the spec or of the cluster, which can correct the error,
		// causes a reconcile.
		return source.Resources{}, err
	}
	// Before the objects are read, so that no change is missed.
	w.setReferences(summary, summaryReferences{namespace: subject.RestrictedNamespace, all: resolved})
	return collect(refs, resolved, subject, func(reference source.ResourceReference) (pin, error) { return w.read(ctx, reference) })
}

// Read returns the objects that Load returns for a summary with these references, and fails like Load. It watches
// nothing: a caller that has an older spec or an older cluster than the last reconcile of the summary, or the spec of a
// deleted one, would otherwise replace the references of that reconcile, and changes would not be reported.
func (w *Watcher) Read(ctx context.Context, refs []configv1beta1.TemplateResourceRef, subject source.Subject) (source.Resources, error) {
	resolved, err := w.resolveAll(refs, subject)
	if err != nil {
		return source.Resources{}, err
	}
	return collect(refs, resolved, subject, func(reference source.ResourceReference) (pin, error) { return w.readUnwatched(ctx, reference) })
}

func (w *Watcher) resolveAll(refs []configv1beta1.TemplateResourceRef, subject source.Subject) ([]source.ResourceReference, error) {
	resolved := make([]source.ResourceReference, 0, len(refs))
	for _, ref := range refs {
		reference, err := w.resolve(ref, subject)
		if err != nil {
			return nil, fmt.Errorf("templateResourceRefs %s: %w", ref.Identifier, err)
		}
		resolved = append(resolved, reference)
	}
	return resolved, nil
}

// collect reads the objects of references. resolved has the resolved refs.
func collect(
	refs []configv1beta1.TemplateResourceRef, resolved []source.ResourceReference, subject source.Subject, read func(source.ResourceReference) (pin, error),
) (source.Resources, error) {
	loaded := source.Resources{Objects: map[string]json.RawMessage{}}
	sum := sha256.New()
	size := 0
	for i, ref := range refs {
		seen, err := read(resolved[i])
		if errors.Is(err, source.ErrNotFound) && ref.Optional {
			seen, err = pin{}, nil
		}
		if err == nil {
			err = checkAllowed(resolved[i], seen, subject, ref.Optional)
		}
		if err != nil {
			return source.Resources{}, fmt.Errorf("templateResourceRefs %s: %w", ref.Identifier, err)
		}
		if seen.content == nil {
			loaded.Absent = append(loaded.Absent, ref.Identifier)
		} else {
			loaded.Objects[ref.Identifier] = seen.content
		}
		loaded.HasSecret = loaded.HasSecret || isSecret(resolved[i])
		if size += len(seen.content); size > source.MaxResourcesSize {
			return source.Resources{}, phase.Invalidf("templateResourceRefs: the objects have more than %d MiB", source.MaxResourcesSize>>20)
		}
		// Each part is quoted, so that different references have different texts.
		_, _ = fmt.Fprintf(sum, "%q %q %q\n", ref.Identifier, fmt.Sprint(resolved[i]), []string{resolved[i].WatchFields, strconv.FormatBool(resolved[i].IgnoreStatus), fmt.Sprintf("%x", sha256.Sum256(seen.content))})
	}
	if len(refs) > 0 {
		loaded.Digest = hex.EncodeToString(sum.Sum(nil))
	}
	return loaded, nil
}

// Forget ends the watch of the objects of a summary.
func (w *Watcher) Forget(summary types.NamespacedName) { w.setReferences(summary, summaryReferences{}) }

// resolve returns a reference. Its namespace is empty for a cluster-scoped kind.
func (w *Watcher) resolve(ref configv1beta1.TemplateResourceRef, subject source.Subject) (source.ResourceReference, error) {
	reference, err := source.ResolveResource(ref, subject)
	if err != nil {
		return source.ResourceReference{}, err
	}
	gvk := keyOf(reference).gvk
	if meta.IsNoMatchError(w.kindError(gvk)) {
		return reference, nil // read returns the error
	}
	mapping, err := w.live.RESTMapper().RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		return reference, nil // read returns the error, and the kind is requested again
	}
	if err != nil {
		return source.ResourceReference{}, fmt.Errorf("find the kind of %s: %w", reference, err)
	}
	if mapping.Scope.Name() != meta.RESTScopeNameRoot {
		return reference, nil
	}
	reference.Namespace = ""
	if subject.RestrictedNamespace != "" {
		return source.ResourceReference{}, phase.Invalidf("%s has no namespace: a Profile reads its own namespace %s only", reference, subject.RestrictedNamespace)
	}
	return reference, nil
}

// kindError returns why a kind cannot be watched.
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
// must not read: the Secrets in the namespace of clusters have kubeconfigs and tokens, and authors of Profiles need not
// be allowed to read them.
func checkAllowed(reference source.ResourceReference, seen pin, subject source.Subject, isOptional bool) error {
	if seen.content == nil && !isOptional {
		return fmt.Errorf("%s %w", reference, source.ErrNotFound)
	}
	if subject.RestrictedNamespace != "" && isSecret(reference) && seen.content != nil && seen.secretType != libv1beta1.ProfileSecretType {
		return phase.Invalidf("%s: its type is %q, but a Profile reads only Secrets of type %q", reference, seen.secretType, libv1beta1.ProfileSecretType)
	}
	return nil
}

// read returns the version that a reference sees. It reads the object if it has not been read. The summary must have
// the reference.
func (w *Watcher) read(ctx context.Context, reference source.ResourceReference) (pin, error) {
	key := keyOf(reference)
	w.mu.Lock()
	found := w.objects[key]
	w.mu.Unlock()
	kindErr := w.kindError(key.gvk)
	if found == nil {
		return pin{}, fmt.Errorf("read %s: the summary has another reference now", reference)
	}
	if meta.IsNoMatchError(kindErr) {
		return pin{}, noKindError(key, reference)
	}
	if kindErr != nil {
		return pin{}, fmt.Errorf("watch %s: %w", reference, kindErr)
	}
	found.reading.Lock()
	defer found.reading.Unlock()
	if seen, isRead := w.pinOf(found, reference); isRead {
		return seen, nil
	}
	if !w.isRead(found) {
		latest, err := w.get(ctx, key, reference)
		if err != nil {
			return pin{}, err
		}
		w.store(found, latest)
		w.objectQueue.AddAfter(key, minReadInterval) // refresh compares it with the informer
	}
	return w.addPin(found, reference)
}

// readUnwatched returns the version that a reference sees, or the latest one if no summary has read the reference.
func (w *Watcher) readUnwatched(ctx context.Context, reference source.ResourceReference) (pin, error) {
	key := keyOf(reference)
	w.mu.Lock()
	found := w.objects[key]
	w.mu.Unlock()
	if found != nil {
		if seen, isRead := w.pinOf(found, reference); isRead {
			return seen, nil
		}
	}
	latest, err := w.get(ctx, key, reference)
	return pin{version: latest}, err
}

func (w *Watcher) pinOf(found *object, reference source.ResourceReference) (pin, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen, ok := found.pins[reference]
	return seen, ok
}

func (w *Watcher) isRead(found *object) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return found.isRead
}

func (w *Watcher) store(found *object, latest version) {
	w.mu.Lock()
	defer w.mu.Unlock()
	found.isRead, found.latest, found.readAt = true, latest, time.Now()
}

// addPin makes a reference see the last version that was read.
func (w *Watcher) addPin(found *object, reference source.ResourceReference) (pin, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	digest, err := digestOf(reference, found.latest)
	if err != nil {
		return pin{}, err
	}
	seen := pin{version: found.latest, digest: digest}
	found.pins[reference] = seen
	return seen, nil
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

// get reads an object from the API server.
func (w *Watcher) get(ctx context.Context, key objectKey, reference source.ResourceReference) (version, error) {
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
		kind, _, _ := unstructured.NestedString(object.Object, "type")
		read.secretType = corev1.SecretType(kind)
	}
	return read, nil
}

// refresh reads an object again, unless the informer has the version that was read, and enqueues the summaries for
// which something has changed that counts. It fails while the informer does not have an object that exists: if such an
// object is deleted before the informer lists it, no event reports the deletion, and it would stay rendered.
func (w *Watcher) refresh(ctx context.Context, key objectKey) error {
	w.mu.Lock()
	found, latest := w.objects[key], version{}
	isRead := found != nil && found.isRead
	if isRead {
		latest = found.latest
	}
	w.mu.Unlock()
	if found == nil {
		return nil
	}
	informed, err := w.informedVersion(ctx, key)
	if err != nil || isRead && informed == latest.resourceVersion {
		return err
	}
	changed, err := w.readAgain(ctx, key, found)
	if err != nil {
		return err
	}
	w.enqueue(ctx, changed)
	w.mu.Lock()
	defer w.mu.Unlock()
	if found.latest.content != nil && informed == "" {
		return errNotInformed
	}
	return nil
}

// informedVersion returns the version of an object that the informer of its kind has, "" if it has none.
func (w *Watcher) informedVersion(ctx context.Context, key objectKey) (string, error) {
	informers := w.kinds
	if isContent(key.gvk) {
		informers = w.content
	}
	object := metadataOf(key.gvk)
	// Get waits for the first list until the context ends. The objects of a kind whose list takes long, or never ends,
	// would occupy all workers.
	withoutWait, cancel := context.WithCancel(ctx)
	cancel()
	err := informers.Get(withoutWait, client.ObjectKey{Namespace: key.namespace, Name: key.name}, object, client.UnsafeDisableDeepCopy)
	if _, isMissing := errors.AsType[*cache.ErrResourceNotCached](err); isMissing || apierrors.IsNotFound(err) {
		return "", nil
	}
	return object.ResourceVersion, err
}

// readAgain reads an object and returns the summaries for which the change counts.
func (w *Watcher) readAgain(ctx context.Context, key objectKey, found *object) (map[types.NamespacedName]struct{}, error) {
	found.reading.Lock()
	defer found.reading.Unlock()
	reference := source.ResourceReference{APIVersion: key.gvk.GroupVersion().String(), Kind: key.gvk.Kind, Namespace: key.namespace, Name: key.name}
	latest, err := w.get(ctx, key, reference)
	if errors.Is(err, source.ErrNotFound) {
		latest, err = version{}, nil // the kind was deleted with its objects
	}
	if err != nil {
		return nil, err
	}
	return w.update(found, latest)
}

// update stores a version of an object and returns the summaries for which it counts.
func (w *Watcher) update(found *object, latest version) (map[types.NamespacedName]struct{}, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed := map[types.NamespacedName]struct{}{}
	for reference, summaries := range found.summaries {
		digest, err := digestOf(reference, latest)
		if err != nil {
			return nil, err
		}
		seen, ok := found.pins[reference]
		if ok && seen.digest == digest {
			continue
		}
		if ok {
			found.pins[reference] = pin{version: latest, digest: digest}
		}
		for summary := range summaries {
			changed[summary] = struct{}{}
		}
	}
	found.isRead, found.latest, found.readAt = true, latest, time.Now()
	return changed, nil
}
