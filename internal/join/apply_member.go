package join

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// What `kubectl apply` says that it did to an object.
const (
	didCreate    = "created"
	didConfigure = "configured"
	didNothing   = "unchanged"
)

// application applies the manifest of one registration to a member, and remembers how to undo it.
type application struct {
	member  client.Client
	request Request
	// former is the name of the Secret of an agent that is replaced, "" if there is none.
	former string
	undo   []func(context.Context) error
}

func newApplication(member *rest.Config, r Request) (*application, error) {
	config := rest.CopyConfig(member)
	config.QPS, config.Burst, config.Timeout = registrationQPS, registrationQPS, reachLimit
	memberClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &application{member: memberClient, request: r}, nil
}

// apply makes obj what the manifest says and returns what that was, in the words of kubectl.
func (a *application) apply(ctx context.Context, obj *unstructured.Unstructured) (did string, err error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	before, found, err := a.live(ctx, obj)
	if err != nil {
		return "", err
	}
	if !found {
		// Noted before the request, since a request that was cut off may have done its work.
		made := obj.DeepCopy()
		a.undo = append(a.undo, func(ctx context.Context) error { return a.remove(ctx, made) })
		err := a.member.Create(ctx, made, client.FieldOwner(kube.FieldManager))
		if err == nil {
			return didCreate, nil
		}
		if answered(err) {
			a.undo = a.undo[:len(a.undo)-1]
		}
		return "", fmt.Errorf("apply %s to the cluster: %w", describe(obj), err)
	}
	if before.GetDeletionTimestamp() != nil {
		return "", fmt.Errorf("apply %s to the cluster: it is being deleted there; try again when it is gone", describe(obj))
	}
	desired := obj.DeepCopy()
	// One that was deleted meanwhile must not be made as if it had been there.
	desired.SetUID(before.GetUID())
	a.undo = append(a.undo, func(ctx context.Context) error { return a.restore(ctx, before) })
	err = a.member.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return "", fmt.Errorf("apply %s to the cluster: %w", describe(obj), err)
	}
	if sameContent(before, desired) {
		return didNothing, nil
	}
	return didConfigure, nil
}

// sameContent says whether two states of an object differ in nothing but in who wrote it.
func sameContent(before, after *unstructured.Unstructured) bool {
	bare := func(obj *unstructured.Unstructured) map[string]any {
		obj = obj.DeepCopy()
		obj.SetManagedFields(nil)
		obj.SetResourceVersion("")
		delete(obj.Object, "status")
		return obj.Object
	}
	return equality.Semantic.DeepEqual(bare(before), bare(after))
}

// answered says whether the API server itself refused a request, so that it cannot have had an effect.
func answered(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < 500 && !apierrors.IsTimeout(err)
}

func (a *application) live(ctx context.Context, obj *unstructured.Unstructured) (live *unstructured.Unstructured, found bool, err error) {
	live = &unstructured.Unstructured{}
	live.SetGroupVersionKind(obj.GroupVersionKind())
	err = a.member.Get(ctx, client.ObjectKeyFromObject(obj), live)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, false, fmt.Errorf("read %s on the cluster: %w", describe(obj), err)
	}
	return live, err == nil, nil
}

// remove deletes an object that this application created. If the answer to that was lost, made has no uid, and the
// object counts as ours if it was written by nobody else.
func (a *application) remove(ctx context.Context, made *unstructured.Unstructured) error {
	now, found, err := a.live(ctx, made)
	if err != nil || !found {
		return err
	}
	uid := made.GetUID()
	foreign := func(entry metav1.ManagedFieldsEntry) bool {
		return entry.Manager != kube.FieldManager && entry.Subresource == ""
	}
	if uid == "" && !slices.ContainsFunc(now.GetManagedFields(), foreign) {
		uid = now.GetUID()
	}
	if uid != now.GetUID() {
		return nil
	}
	err = a.member.Delete(ctx, now, client.Preconditions{UID: &uid}, client.PropagationPolicy(metav1.DeletePropagationBackground))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back %s on the cluster: %w", describe(made), err)
	}
	return nil
}

// restore gives an object the fields that it had before. Its status stays what it is.
func (a *application) restore(ctx context.Context, before *unstructured.Unstructured) error {
	err := kube.RetryOnConflict(ctx, func() error {
		now, found, err := a.live(ctx, before)
		if err != nil || !found || now.GetUID() != before.GetUID() || now.GetResourceVersion() == before.GetResourceVersion() {
			return err
		}
		old := before.DeepCopy()
		old.SetResourceVersion(now.GetResourceVersion())
		// Who wrote which field is the API server's to find out.
		old.SetManagedFields(nil)
		if status, ok := now.Object["status"]; ok {
			old.Object["status"] = status
		}
		return client.IgnoreNotFound(a.member.Update(ctx, old, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("take back %s on the cluster: %w", describe(before), err)
	}
	return nil
}

// takeBack undoes what was applied, newest first. It also works after ctx was cancelled.
func (a *application) takeBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var errs []error
	for _, undo := range slices.Backward(a.undo) {
		errs = append(errs, undo(ctx))
	}
	a.undo = nil
	return errors.Join(errs...)
}

// kubectlName names an object as kubectl does: kind.group/name, in lower case.
func kubectlName(obj *unstructured.Unstructured) string {
	gvk := obj.GroupVersionKind()
	name := strings.ToLower(gvk.Kind)
	if gvk.Group != "" {
		name += "." + gvk.Group
	}
	return name + "/" + obj.GetName()
}
