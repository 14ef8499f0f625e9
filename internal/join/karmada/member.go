package karmada

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

const (
	// tokenWait is how long the member's token controller may take: the time of the Karmada surface.
	tokenWait = 30 * time.Second
	// tokenPoll is the time between two looks for a token.
	tokenPoll = 100 * time.Millisecond
)

// settlement makes the objects of one registration on the member, and remembers how to take them back. They carry its
// attempt, which no other run of a registration has, so that undoing leaves alone what another run wrote later.
type settlement struct {
	footprint
	attempt string
	undo    []func(context.Context) error
}

// credential is what a token Secret of the member has.
type credential struct{ token, authority []byte }

// settle makes everything, and returns the tokens of the hub's account and of the impersonator.
func (s *settlement) settle(ctx context.Context) (account, impersonation credential, err error) {
	shared, own := s.shared(), s.own()
	for _, obj := range shared[:2] {
		if err := s.share(ctx, obj); err != nil {
			return account, impersonation, err
		}
	}
	impersonation, err = s.token(ctx, shared[2].(*corev1.Secret), s.share)
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret for impersonation from cluster(%s), error: %w", s.cluster, err)
	}
	for _, obj := range own[:3] {
		if err := s.make(ctx, obj); err != nil {
			return account, impersonation, err
		}
	}
	account, err = s.token(ctx, own[3].(*corev1.Secret), s.make)
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret from cluster(%s), error: %w", s.cluster, err)
	}
	return account, impersonation, nil
}

// token makes a Secret and waits until it has a token.
func (s *settlement) token(ctx context.Context, secret *corev1.Secret, provide func(context.Context, client.Object) error) (credential, error) {
	if err := provide(ctx, secret); err != nil {
		return credential{}, err
	}
	var got credential
	err := wait.PollUntilContextTimeout(ctx, tokenPoll, tokenWait, true, func(context.Context) (bool, error) {
		live, found, err := s.find(ctx, secret)
		if err != nil {
			return false, err
		}
		if !found {
			// It was an old account's, which the member's controller has just found out.
			return false, provide(ctx, secret)
		}
		data := live.(*corev1.Secret).Data
		got = credential{token: data[corev1.ServiceAccountTokenKey], authority: data[corev1.ServiceAccountRootCAKey]}
		return len(got.token) > 0, nil
	})
	if err != nil {
		return credential{}, fmt.Errorf("failed to get serviceAccount secret, error: %w", err)
	}
	return got, nil
}

// make makes an object of our own. One that a former run left is taken over, one that somebody else made is used as it
// is.
func (s *settlement) make(ctx context.Context, obj client.Object) error {
	desired := obj.DeepCopyObject().(client.Object)
	annotate(desired, attemptAnnotation, s.attempt)
	return s.write(ctx, desired, func(live client.Object) (func(context.Context) error, error) {
		if err := s.checkHub(live); err != nil || !s.isOurs(live) {
			return nil, err
		}
		before := live.GetAnnotations()[attemptAnnotation]
		annotate(live, attemptAnnotation, s.attempt)
		refresh(live, desired)
		return func(ctx context.Context) error { return s.takeBack(ctx, desired, before) }, nil
	})
}

// share makes an object that other registrations may use too, or enters among its users. One that somebody else made is
// used as it is.
func (s *settlement) share(ctx context.Context, obj client.Object) error {
	desired := obj.DeepCopyObject().(client.Object)
	annotate(desired, s.user(), s.attempt)
	return s.write(ctx, desired, func(live client.Object) (func(context.Context) error, error) {
		if !isShared(live) {
			return nil, nil
		}
		before := live.GetAnnotations()[s.user()]
		annotate(live, s.user(), s.attempt)
		// A removal that was about to let it go with the last user finds that there is another one.
		live.SetOwnerReferences(nil)
		return func(ctx context.Context) error { return s.unshare(ctx, desired, before) }, nil
	})
}

// write creates desired, or has the one changed that is there. change returns how to undo what it did; nil: it did
// nothing.
func (s *settlement) write(ctx context.Context, desired client.Object, change func(live client.Object) (func(context.Context) error, error)) error {
	err := insist(ctx, func() error { return s.try(ctx, desired, change) })
	if err != nil {
		return fmt.Errorf("write %s on the cluster: %w", s.ref(desired), err)
	}
	return nil
}

// try is one try of write. How to undo is noted before each request, since a request that was cut off may have done its
// work.
func (s *settlement) try(ctx context.Context, desired client.Object, change func(live client.Object) (func(context.Context) error, error)) error {
	live, found, err := s.find(ctx, desired)
	if err != nil {
		return err
	}
	if !found {
		s.undo = append(s.undo, func(ctx context.Context) error { return s.unmake(ctx, desired) })
		return s.member.Create(ctx, desired.DeepCopyObject().(client.Object), client.FieldOwner(kube.FieldManager))
	}
	if !live.GetDeletionTimestamp().IsZero() {
		return s.awaitGone(ctx, live)
	}
	undo, err := change(live)
	if undo == nil || err != nil {
		return err
	}
	s.undo = append(s.undo, undo)
	return s.member.Update(ctx, live, client.FieldOwner(kube.FieldManager))
}

// awaitGone waits for an object that is being deleted. It always returns an error: that it is not there any more, if it
// is not.
func (s *settlement) awaitGone(ctx context.Context, going client.Object) error {
	err := wait.PollUntilContextTimeout(ctx, tokenPoll, namespaceWait, true, func(context.Context) (bool, error) {
		live, found, err := s.find(ctx, going)
		return !found || err == nil && live.GetUID() != going.GetUID(), err
	})
	if err != nil {
		return fmt.Errorf("it is being deleted: %w", err)
	}
	return apierrors.NewNotFound(corev1.Resource("objects"), going.GetName())
}

// unmake deletes an object that this run created, if no other run has used it since.
func (s *settlement) unmake(ctx context.Context, obj client.Object) error {
	if obj.GetAnnotations()[attemptAnnotation] == "" {
		return s.unshare(ctx, obj, "")
	}
	return s.takeBack(ctx, obj, "")
}

// takeBack gives an object of our own back to the run before, or deletes it if there was none.
func (s *settlement) takeBack(ctx context.Context, obj client.Object, before string) error {
	if before != "" {
		return s.update(ctx, obj, func(live client.Object) bool {
			mine := live.GetAnnotations()[attemptAnnotation] == s.attempt
			annotate(live, attemptAnnotation, before)
			return mine
		})
	}
	live, found, err := s.find(ctx, obj)
	if err != nil || !found || live.GetAnnotations()[attemptAnnotation] != s.attempt {
		return err
	}
	uid, version := live.GetUID(), live.GetResourceVersion()
	err = s.member.Delete(ctx, live, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if apierrors.IsConflict(err) {
		// A controller has written to it, or another run, which the next look tells.
		return s.takeBack(ctx, obj, before)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("take back %s on the cluster: %w", s.ref(obj), err)
	}
	return nil
}

// unshare gives a shared object back to the run before, or takes this registration out of its users. With the last one
// it goes, unless it is a namespace in which somebody else has something.
func (s *settlement) unshare(ctx context.Context, obj client.Object, before string) error {
	if before != "" {
		return s.update(ctx, obj, func(live client.Object) bool {
			mine := live.GetAnnotations()[s.user()] == s.attempt
			annotate(live, s.user(), before)
			return mine
		})
	}
	if _, isNamespace := obj.(*corev1.Namespace); isNamespace {
		strange, err := s.stranger(ctx)
		if err != nil {
			return err
		}
		if strange != "" {
			return s.update(ctx, obj, func(live client.Object) bool {
				return live.GetAnnotations()[s.user()] == s.attempt && dropUser(live, s.user())
			})
		}
	}
	_, err := s.drop(ctx, obj, func(note string) bool { return note == s.attempt })
	return err
}

// rollBack takes everything back, the newest first.
func (s *settlement) rollBack(ctx context.Context) error {
	var errs []error
	for i := len(s.undo) - 1; i >= 0; i-- {
		errs = append(errs, s.undo[i](ctx))
	}
	return errors.Join(errs...)
}

// refresh makes an object of our own what it is to be, whoever changed it.
func refresh(live, desired client.Object) {
	live.SetOwnerReferences(nil)
	switch now := live.(type) {
	case *rbacv1.ClusterRole:
		now.Rules = desired.(*rbacv1.ClusterRole).Rules
	case *rbacv1.ClusterRoleBinding:
		now.Subjects = desired.(*rbacv1.ClusterRoleBinding).Subjects
	}
}

func annotate(obj client.Object, key, value string) {
	annotations := map[string]string{}
	for k, v := range obj.GetAnnotations() {
		annotations[k] = v
	}
	annotations[key] = value
	obj.SetAnnotations(annotations)
}

// memberID returns what tells a cluster from every other: the uid of its kube-system namespace.
func memberID(ctx context.Context, member client.Reader) (string, error) {
	namespace := &corev1.Namespace{}
	if err := member.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, namespace); err != nil {
		return "", fmt.Errorf("read namespace %s of the cluster: %w", metav1.NamespaceSystem, err)
	}
	return string(namespace.UID), nil
}
