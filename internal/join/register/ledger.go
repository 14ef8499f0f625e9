package register

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

const (
	// requestLimit is how long one request to the cluster or to the control plane may take.
	requestLimit = 10 * time.Second
	// undoLimit is how long taking back may take on the cluster: about ten requests.
	undoLimit = 30 * time.Second
	// requestQPS is enough for the requests of one run not to wait for each other.
	requestQPS = 100
)

// connect returns a client that waits for no answer longer than requestLimit, or for one to a read longer than ctx.
func connect(ctx context.Context, config *rest.Config) (client.Client, error) {
	return client.New(bounded(ctx, config), client.Options{Scheme: kube.Scheme()})
}

func bounded(ctx context.Context, config *rest.Config) *rest.Config {
	config = Interruptible(ctx, config)
	config.QPS, config.Burst, config.Timeout = requestQPS, requestQPS, requestLimit
	return config
}

// member is the cluster that is registered.
type member struct {
	client.Client
	// kinds tells, when a namespace is removed, what can be in it.
	kinds discovery.ServerResourcesInterface
}

func newMember(ctx context.Context, config *rest.Config) (member, error) {
	memberClient, err := connect(ctx, config)
	if err != nil {
		return member{}, fmt.Errorf("connect to the cluster: %w", err)
	}
	quiet := bounded(ctx, config)
	quiet.WarningHandler, quiet.WarningHandlerWithContext = rest.NoWarnings{}, nil
	kinds, err := discovery.NewDiscoveryClientForConfig(quiet)
	if err != nil {
		return member{}, fmt.Errorf("connect to the cluster: %w", err)
	}
	return member{memberClient, kinds}, nil
}

// ledger writes the objects of one registration to the cluster, and remembers how to undo that.
type ledger struct {
	member  member
	attempt string
	undo    []func(context.Context) error
}

// write makes obj what it is to be. One that exists is only changed if the registration may replace what is there;
// taking back then restores it, unless it is what is left of a run of this registration that did not get through: that
// goes, too.
func (l *ledger) write(ctx context.Context, obj client.Object, over replaces) error {
	desired, err := untyped(obj)
	if err != nil {
		return err
	}
	before, found, err := l.live(ctx, desired)
	if err != nil {
		return err
	}
	if !found {
		return l.create(ctx, desired)
	}
	if before.GetDeletionTimestamp() != nil {
		return fmt.Errorf("write %s to the cluster: it is being deleted there; try again when it is gone", kube.RefOf(before))
	}
	switch over {
	case nothing:
		return fmt.Errorf("write %s to the cluster: it has just been made by somebody else", kube.RefOf(before))
	case remains:
		l.note(func(ctx context.Context) error { return l.remove(ctx, before, "") })
	case agent:
		l.note(func(ctx context.Context) error { return l.restore(ctx, before) })
	}
	// One that was deleted meanwhile must not be made as if it had been there.
	desired.SetUID(before.GetUID())
	err = l.member.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("write %s to the cluster: %w", kube.RefOf(before), err)
	}
	return nil
}

// replaces says what a registration may find on the cluster, and write over.
type replaces int

const (
	nothing replaces = iota
	remains          // what a run of this registration left that did not get through
	agent            // the agent of this very cluster
)

func (l *ledger) note(undo func(context.Context) error) { l.undo = append(l.undo, undo) }

// create creates desired. How to undo it is noted before the request, since a request that was cut off may have done
// its work.
func (l *ledger) create(ctx context.Context, desired *unstructured.Unstructured) error {
	made := desired.DeepCopy()
	l.note(func(ctx context.Context) error { return l.remove(ctx, made, l.attempt) })
	if err := l.member.Create(ctx, made, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write %s to the cluster: %w", kube.RefOf(desired), err)
	}
	return nil
}

func (l *ledger) live(ctx context.Context, obj *unstructured.Unstructured) (live *unstructured.Unstructured, found bool, err error) {
	live = &unstructured.Unstructured{}
	live.SetGroupVersionKind(obj.GroupVersionKind())
	err = l.member.Get(ctx, client.ObjectKeyFromObject(obj), live)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, false, fmt.Errorf("read %s on the cluster: %w", kube.RefOf(obj), err)
	}
	return live, err == nil, nil
}

// remove deletes obj if it is still the object that it was: the one with its uid or, if the answer to its creation was
// lost, with the attempt.
func (l *ledger) remove(ctx context.Context, obj *unstructured.Unstructured, attempt string) error {
	now, found, err := l.live(ctx, obj)
	if err != nil || !found {
		return err
	}
	same := now.GetUID() == obj.GetUID() || obj.GetUID() == "" && attempt != "" && now.GetAnnotations()[attemptAnnotation] == attempt
	if !same {
		return nil
	}
	uid := now.GetUID()
	err = l.member.Delete(ctx, now, client.Preconditions{UID: &uid}, client.PropagationPolicy("Background"))
	if client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("take back %s on the cluster: %w", kube.RefOf(obj), err)
	}
	return nil
}

// restore gives an object the fields that it had before. Its status stays what it is.
func (l *ledger) restore(ctx context.Context, before *unstructured.Unstructured) error {
	err := kube.RetryOnConflict(ctx, func() error {
		now, found, err := l.live(ctx, before)
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
		return client.IgnoreNotFound(l.member.Update(ctx, old, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("take back %s on the cluster: %w", kube.RefOf(before), err)
	}
	return nil
}

// ensureNamespace makes the namespace unless it is there. One that was made for this cluster goes if the registration
// fails, also if it was an earlier run that made it, unless its agent is there to stay.
func (l *ledger) ensureNamespace(ctx context.Context, obj client.Object, over replaces) error {
	cluster := obj.GetLabels()[RegistrationLabel]
	undo := func(ctx context.Context) error {
		now := &corev1.Namespace{}
		found, err := l.member.find(ctx, client.ObjectKeyFromObject(obj), now)
		if err != nil || !found || !ownNamespace(now, cluster) {
			return err
		}
		return l.member.removeNamespace(ctx, now)
	}
	live := &corev1.Namespace{}
	found, err := l.member.find(ctx, client.ObjectKeyFromObject(obj), live)
	if err != nil {
		return err
	}
	if over != agent {
		l.note(undo)
	}
	if found {
		return nil
	}
	desired, err := untyped(obj)
	if err != nil {
		return err
	}
	err = l.member.Create(ctx, desired, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s on the cluster: %w", obj.GetName(), err)
	}
	return nil
}

// ensureRole makes the ClusterRole unless a registration made it already.
func (l *ledger) ensureRole(ctx context.Context, obj client.Object, over replaces) error {
	desired, err := untyped(obj)
	if err != nil {
		return err
	}
	before, found, err := l.live(ctx, desired)
	if err != nil {
		return err
	}
	if found {
		if over == remains {
			l.note(func(ctx context.Context) error { return l.removeRole(ctx, before) })
		}
		return checkShared(before)
	}
	l.note(func(ctx context.Context) error { return l.removeRole(ctx, desired) })
	if err := l.member.Create(ctx, desired.DeepCopy(), client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("write %s to the cluster: %w", kube.RefOf(desired), err)
	}
	return nil
}

// removeRole deletes the ClusterRole after its binding; if others are bound by then, it is theirs.
func (l *ledger) removeRole(ctx context.Context, role *unstructured.Unstructured) error {
	if others, err := l.member.bound(ctx); others || err != nil {
		return err
	}
	return l.remove(ctx, role, l.attempt)
}

// checkShared refuses an object that all agents of a cluster share if no registration made it.
func checkShared(live client.Object) error {
	if !madeHere(live) {
		return fmt.Errorf("%s %s exists on the cluster and was not made by a registration: remove or rename it", live.GetObjectKind().GroupVersionKind().Kind, live.GetName())
	}
	return nil
}

// bound says whether the agents of any namespace are bound to the ClusterRole.
func (m member) bound(ctx context.Context) (bool, error) {
	binding := &rbacv1.ClusterRoleBinding{}
	err := m.Get(ctx, client.ObjectKey{Name: AgentRole}, binding)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read ClusterRoleBinding %s on the cluster: %w", AgentRole, err)
	}
	return err == nil && len(binding.Subjects) > 0, nil
}

// ensureBinding binds the agent, beside those of other namespaces.
func (l *ledger) ensureBinding(ctx context.Context, desired *rbacv1.ClusterRoleBinding, over replaces) error {
	ours, noted := desired.Subjects[0], false
	note := func() {
		if !noted {
			l.note(func(ctx context.Context) error { return l.member.unbind(ctx, ours) })
		}
		noted = true
	}
	if over == remains {
		note()
	}
	err := kube.RetryOn(ctx, raced, func() error {
		live := &rbacv1.ClusterRoleBinding{}
		err := l.member.Get(ctx, client.ObjectKeyFromObject(desired), live)
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		found := err == nil
		if found && slices.Contains(live.Subjects, ours) {
			return nil
		}
		note()
		if !found {
			return l.member.Create(ctx, desired.DeepCopy(), client.FieldOwner(kube.FieldManager))
		}
		live.SetGroupVersionKind(rbacv1.SchemeGroupVersion.WithKind("ClusterRoleBinding"))
		if err := checkShared(live); err != nil {
			return err
		}
		if live.RoleRef != desired.RoleRef {
			return fmt.Errorf("ClusterRoleBinding %s is about %s %s", live.Name, live.RoleRef.Kind, live.RoleRef.Name)
		}
		live.Subjects = append(live.Subjects, ours)
		return l.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
	})
	if err != nil {
		return fmt.Errorf("bind the agent on the cluster: %w", err)
	}
	return nil
}

// raced says that somebody else wrote an object at the same time.
func raced(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
}

// unbind takes the agent of one namespace out of the ClusterRoleBinding, which goes with the last one.
func (m member) unbind(ctx context.Context, subject rbacv1.Subject) error {
	err := kube.RetryOn(ctx, raced, func() error {
		live := &rbacv1.ClusterRoleBinding{}
		if err := m.Get(ctx, client.ObjectKey{Name: AgentRole}, live); err != nil {
			return client.IgnoreNotFound(err)
		}
		without := slices.DeleteFunc(slices.Clone(live.Subjects), func(s rbacv1.Subject) bool { return s == subject })
		switch {
		case len(without) == len(live.Subjects):
			return nil
		case len(without) == 0 && madeHere(live):
			uid, version := live.UID, live.ResourceVersion
			return client.IgnoreNotFound(m.Delete(ctx, live, client.Preconditions{UID: &uid, ResourceVersion: &version}))
		}
		live.Subjects = without
		return client.IgnoreNotFound(m.Update(ctx, live, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("take the agent out of ClusterRoleBinding %s on the cluster: %w", AgentRole, err)
	}
	return nil
}

// takeBack undoes what was written, newest first. It also works after ctx was cancelled.
func (l *ledger) takeBack(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoLimit)
	defer cancel()
	var errs []error
	for _, undo := range slices.Backward(l.undo) {
		errs = append(errs, undo(ctx))
	}
	l.undo = nil
	return errors.Join(errs...)
}
