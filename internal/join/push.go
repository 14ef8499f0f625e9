package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
)

// PushRequest asks to register a cluster that the hub dials.
type PushRequest struct {
	Request
	// Kubeconfig is how the hub reaches the cluster. It must hold everything it needs.
	Kubeconfig []byte
}

// Validate says what is wrong with r before anything connects. The error names the command-line flag and its value.
func (r PushRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	if _, err := selfContained(r.Kubeconfig); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	return nil
}

// RegisterPush checks that the kubeconfig reaches the cluster and may work there, and then keeps it on the hub beside a SveltosCluster.
// Registering again replaces the kubeconfig and adds the labels. When it fails, or when ctx ends, what it made and changed is
// taken back.
func RegisterPush(ctx context.Context, hub *rest.Config, r PushRequest) error {
	if err := r.Validate(); err != nil {
		return err
	}
	member, err := selfContained(r.Kubeconfig)
	if err != nil {
		return err
	}
	if err := checkReach(ctx, member); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	l, err := newLedger(hub, r.Request)
	if err != nil {
		return err
	}
	if err := l.registerPush(ctx, r); err != nil {
		return errors.Join(fmt.Errorf("register cluster %s: %w", r.key(), err), l.rollBack(ctx))
	}
	return nil
}

func (l *ledger) registerPush(ctx context.Context, r PushRequest) error {
	live, found, err := findCluster(ctx, l.hubClient, r.Request)
	if err != nil {
		return err
	}
	if found && live.Spec.PullMode {
		return errors.New("it is registered in pull mode already; deregister it first")
	}
	if _, err := l.makeNamespace(ctx, r.Namespace, nil); err != nil {
		return err
	}
	desired := clusterOf(r.Request, live)
	desired.Spec.KubeconfigKeyName = cmp.Or(live.Spec.KubeconfigKeyName, KubeconfigKey)
	// A cluster that was not registered by us may name a Secret, and the hub reads no other one.
	secret := &corev1.Secret{
		ObjectMeta: named(r.Namespace, cmp.Or(live.Spec.KubeconfigName, KubeconfigSecret(r.Name))),
		Data:       map[string][]byte{desired.Spec.KubeconfigKeyName: r.Kubeconfig},
	}
	if live.Spec.KubeconfigName == "" {
		secret.Labels = map[string]string{registrationLabel: r.Name}
	}
	if _, err := l.apply(ctx, secret); err != nil {
		return err
	}
	_, err = l.apply(ctx, desired)
	return err
}
