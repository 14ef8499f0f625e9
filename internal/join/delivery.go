package join

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// vacantLimit is how long a registration waits for an earlier namespace of the same name to go: deleting what agents have in it takes
	// Kubernetes some seconds.
	vacantLimit = 30 * time.Second
	vacantPoll  = time.Second / 4
)

// errClaimed says that a namespace already carries the deliveries of another cluster.
var errClaimed = errors.New("carries the deliveries of another cluster")

// deliveryNamespace returns the hub namespace in which the groups and bundles of a pull-mode cluster live, and its own namespace in push mode.
func deliveryNamespace(cluster *libv1beta1.SveltosCluster) string {
	if namespace := cluster.Annotations[kube.AnnotationDeliveryNS]; namespace != "" {
		return namespace
	}
	return cluster.Namespace
}

// claimDelivery finds the namespace for the deliveries of a cluster, and makes it that cluster's alone: the cluster's own namespace if
// no other pull-mode cluster has it, else one derived from both names. A cluster keeps what it has; that of a new one is empty.
func (l *ledger) claimDelivery(ctx context.Context, r Request, cluster *libv1beta1.SveltosCluster) (string, error) {
	has := cluster.Annotations[kube.AnnotationDeliveryNS]
	// Bundles for several members live in kube.AgentNamespace, so that no single cluster may claim it.
	if (has == "" || has == r.Namespace) && r.Namespace != kube.AgentNamespace {
		err := l.claim(ctx, r.Namespace, r.Name)
		if err == nil {
			return r.Namespace, nil
		}
		if !errors.Is(err, errClaimed) {
			return "", err
		}
	}
	if has == "" || has == r.Namespace {
		has = derivedNamespace(r)
	}
	if err := l.awaitVacant(ctx, has); err != nil {
		return "", err
	}
	holder := r.key()
	created, err := l.makeNamespace(ctx, has, map[string]string{kube.AnnotationDeliveryHolder: holder})
	if err != nil || created {
		return has, err
	}
	return has, l.claim(ctx, has, holder)
}

// awaitVacant waits while the namespace is going away, as that of a cluster does which has just been deregistered.
func (l *ledger) awaitVacant(ctx context.Context, name string) error {
	limited, cancel := context.WithTimeout(ctx, vacantLimit)
	defer cancel()
	going := false
	err := wait.PollUntilContextCancel(limited, vacantPoll, true, func(ctx context.Context) (bool, error) {
		namespace := &corev1.Namespace{}
		err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace)
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		going = err == nil && namespace.DeletionTimestamp != nil
		return !going, err
	})
	if err != nil && going && ctx.Err() == nil {
		return fmt.Errorf("namespace %s has been going away for longer than %s; something in it cannot be deleted", name, vacantLimit)
	}
	if err != nil {
		return fmt.Errorf("read namespace %s: %w", name, err)
	}
	return nil
}

// claim writes holder into the namespace's claim unless another one is there, which is errClaimed.
func (l *ledger) claim(ctx context.Context, name, holder string) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		namespace := &corev1.Namespace{}
		if err := l.hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
			return fmt.Errorf("read namespace %s: %w", name, err)
		}
		switch namespace.Annotations[kube.AnnotationDeliveryHolder] {
		case holder:
			return nil
		case "":
		default:
			return fmt.Errorf("namespace %s %w", name, errClaimed)
		}
		// Noted before the request, since a request that was cut off may have done its work.
		l.undo = append(l.undo, func(ctx context.Context) error { return l.giveUp(ctx, name, holder) })
		return l.writeClaim(ctx, namespace, holder)
	})
}

// giveUp releases a claim, unless another registration of the same cluster relies on it.
func (l *ledger) giveUp(ctx context.Context, name, holder string) error {
	if relied, err := l.reliedOn(ctx); relied || err != nil {
		return err
	}
	return releaseClaim(ctx, l.hubClient, name, holder)
}

// reliedOn says whether another registration of the same cluster succeeded meanwhile: the ServiceAccount is still there then.
func (l *ledger) reliedOn(ctx context.Context) (bool, error) {
	account := &corev1.ServiceAccount{}
	err := l.hubClient.Get(ctx, client.ObjectKey{Namespace: l.request.Namespace, Name: l.request.Name}, account)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read ServiceAccount %s: %w", l.request.key(), err)
	}
	return err == nil && account.Labels[registrationLabel] == l.request.Name && account.DeletionTimestamp == nil, nil
}

func (l *ledger) writeClaim(ctx context.Context, namespace *corev1.Namespace, holder string) error {
	before := namespace.DeepCopy()
	if namespace.Annotations == nil {
		namespace.Annotations = map[string]string{}
	}
	namespace.Annotations[kube.AnnotationDeliveryHolder] = holder
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	err := l.hubClient.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager))
	if err != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("claim namespace %s: %w", namespace.Name, err)
	}
	return err
}

// releaseClaim takes the claim of holder off a namespace; any other claim stays.
func releaseClaim(ctx context.Context, hubClient client.Client, name, holder string) error {
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		namespace := &corev1.Namespace{}
		if err := hubClient.Get(ctx, client.ObjectKey{Name: name}, namespace); err != nil {
			return client.IgnoreNotFound(err)
		}
		if namespace.Annotations[kube.AnnotationDeliveryHolder] != holder {
			return nil
		}
		before := namespace.DeepCopy()
		delete(namespace.Annotations, kube.AnnotationDeliveryHolder)
		patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
		return client.IgnoreNotFound(hubClient.Patch(ctx, namespace, patch, client.FieldOwner(kube.FieldManager)))
	})
	if err != nil {
		return fmt.Errorf("release namespace %s: %w", name, err)
	}
	return nil
}

// derivedNamespace returns <namespace>--<cluster>, with a hash in place of the end where that is too long or could mean another pair.
func derivedNamespace(r Request) string {
	const limit, hashed = 63, 12
	plain := r.Namespace + "--" + r.Name
	if len(plain) <= limit && strings.Count(plain, "--") == 1 {
		return plain
	}
	sum := sha256.Sum256([]byte(r.key()))
	suffix := strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:hashed]
	return strings.Trim(plain[:min(len(plain), limit-hashed-1)], "-") + "-" + suffix
}
