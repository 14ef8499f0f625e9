package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

const (
	// accessTimeout limits the wait for the agent's access to the control plane.
	accessTimeout = 30 * time.Second
	// deletionTimeout limits the deletion of a Cluster in a rollback.
	deletionTimeout = 25 * time.Second
	// gracePeriod is the time for which an interrupted registration continues to wait for its certificate, and then for
	// access. The control plane may have created the Cluster, and the rollback needs the certificate to delete it.
	gracePeriod = 10 * time.Second
)

// requestCertificate gets the agent's certificate. In modeResume it uses the existing one if it can: the token may have
// expired.
func (g *registration) requestCertificate(ctx context.Context) error {
	if g.mode == modeResume && g.useExistingKubeconfig(ctx) {
		return nil
	}
	r := g.request
	discovery := bootstrap.Discovery{
		Endpoint: r.Endpoint, Token: g.token, Pins: r.Pins, UnsafeSkipCA: r.UnsafeSkipCA, Timeout: r.DiscoveryTimeout, Progress: r.Progress,
	}
	ca, err := discovery.CA(ctx)
	if err != nil {
		return err
	}
	config := &rest.Config{
		Host: "https://" + r.Endpoint, BearerToken: g.token.String(), TLSClientConfig: rest.TLSClientConfig{CAData: ca},
		Timeout: requestTimeout,
	}
	if err := ctx.Err(); err != nil {
		return err // requestCtx outlasts ctx by gracePeriod
	}
	requestCtx, cancel := g.withGracePeriod(ctx)
	defer cancel()
	certificate, err := bootstrap.RequestCertificate(requestCtx, config, bootstrap.CertificateRequest{
		Cluster: r.ClusterName, ID: g.id, Lifetime: r.CertLifetime, Until: time.Now().Add(r.DiscoveryTimeout), Progress: r.Progress,
	})
	var denied *bootstrap.DeniedError
	if errors.As(err, &denied) {
		return fmt.Errorf("the control plane refuses cluster %s (%s): %w", r.ClusterName, denied.Reason, err)
	}
	if err != nil {
		return err
	}
	kubeconfig, err := encodeKubeconfig(r.ClusterName, r.Endpoint, ca, certificate.CertPEM, certificate.KeyPEM)
	if err != nil {
		return err
	}
	if err := g.setKubeconfig(ctx, kubeconfig, certificate.CSR); err != nil {
		return err
	}
	return ctx.Err() // a run that was interrupted in the grace period is rolled back
}

// withGracePeriod returns a context that ends gracePeriod after ctx. In modeRenew it ends with ctx: a renewal creates
// no Cluster that must be deleted.
func (g *registration) withGracePeriod(ctx context.Context) (context.Context, context.CancelFunc) {
	if g.mode == modeRenew {
		return context.WithCancel(ctx)
	}
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(gracePeriod, cancel) })
	return longer, func() { stop(); cancel() }
}

// useExistingKubeconfig uses the kubeconfig that the unfinished registration has stored in the Secret. It returns false
// if the Secret has no valid kubeconfig, its certificate authorities are not pinned, or it gives no access to the
// Cluster.
func (g *registration) useExistingKubeconfig(ctx context.Context) bool {
	secret := g.existing.secret
	if secret == nil {
		return false
	}
	config, err := fleet.ParseKubeconfig(secret.Data[KubeconfigKey])
	if err != nil || !g.isPinned(config.CAData) || g.setKubeconfig(ctx, secret.Data[KubeconfigKey], secret.Annotations[certificateAnnotation]) != nil {
		return false
	}
	cluster, err := g.readCluster(ctx)
	g.usesExistingKubeconfig = err == nil && cluster.Spec.ID == g.id && cluster.DeletionTimestamp.IsZero()
	if !g.usesExistingKubeconfig {
		g.kubeconfig, g.csr, g.hub = nil, "", nil
	}
	return g.usesExistingKubeconfig
}

// isPinned returns whether a certificate authority in ca has a pinned key. Without pins, it returns true.
func (g *registration) isPinned(ca []byte) bool {
	if len(g.request.Pins) == 0 {
		return true
	}
	known, err := bootstrap.Pins(ca)
	return err == nil && slices.ContainsFunc(known, func(pin string) bool {
		return slices.ContainsFunc(g.request.Pins, func(allowed string) bool { return strings.EqualFold(pin, strings.TrimSpace(allowed)) })
	})
}

func (g *registration) setKubeconfig(ctx context.Context, kubeconfig []byte, csr string) error {
	config, err := fleet.ParseKubeconfig(kubeconfig)
	if err != nil {
		return fmt.Errorf("use the agent's kubeconfig: %w", err)
	}
	hub, _, err := join.NewClient(kube.Interruptible(ctx, config), requestTimeout)
	if err != nil {
		return fmt.Errorf("connect to the control plane: %w", err)
	}
	g.kubeconfig, g.csr, g.hub = kubeconfig, csr, hub
	return nil
}

func (g *registration) readCluster(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	cluster := &clusterv1alpha1.Cluster{}
	if err := g.hub.Get(ctx, client.ObjectKey{Name: g.request.ClusterName}, cluster); err != nil {
		return nil, fmt.Errorf("read Cluster %s on the control plane: %w", g.request.ClusterName, err)
	}
	return cluster, nil
}

// awaitAccess waits until the agent may read its Cluster, and sets canReadCluster. It sets ownsCluster if one of these
// is true:
//   - usesExistingKubeconfig;
//   - no agent has reported a Kubernetes version, and the hub has written the token of this run to the bootstrap-token
//     annotation at the approval.
//
// Without ownsCluster, rollBack keeps the Cluster.
func (g *registration) awaitAccess(ctx context.Context, timeout time.Duration) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, func(context.Context) (bool, error) {
		cluster, err := g.readCluster(ctx)
		if err != nil {
			last = err
			return false, nil //nolint:nilerr // the agent may get its access later
		}
		g.canReadCluster = true
		if cluster.Spec.ID != g.id {
			return false, fmt.Errorf("the control plane has another cluster under the name %s: its ID is %s, and here it is %s", cluster.Name, cluster.Spec.ID, g.id)
		}
		if g.usesExistingKubeconfig || cluster.Status.KubernetesVersion == "" && cluster.Annotations[kube.AnnotationBootstrapToken] == g.token.ID {
			g.ownsCluster = true
		}
		return true, nil
	})
	if wait.Interrupted(err) {
		return fmt.Errorf("wait for the rights of the agent on the control plane: %w", cmp.Or(ctx.Err(), last, err))
	}
	return err
}

// deleteCluster deletes the Cluster, and waits for the deletion. It keeps the Cluster unless ownsCluster is true and no
// other run uses the Cluster.
func (g *registration) deleteCluster(ctx context.Context) error {
	if g.hub == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deletionTimeout)
	defer cancel()
	if !g.canReadCluster {
		err := g.awaitAccess(ctx, gracePeriod)
		// Before the first read, Forbidden does not mean that the Cluster was deleted: the agent may get its access later.
		if apierrors.IsForbidden(err) {
			return fmt.Errorf("the control plane denied access to the agent, and Cluster %s may stay there: %w", g.request.ClusterName, err)
		}
		if !g.canReadCluster {
			return ignoreAccessEnded(err)
		}
	}
	if !g.ownsCluster {
		return nil
	}
	if isUsed, err := g.isUsedByOtherRun(ctx); err != nil || isUsed {
		return err
	}
	options := karmada.DeleteOptions{Timeout: deletionTimeout, Progress: func(string) {}}
	err := karmada.DeleteCluster(ctx, g.hub, g.request.ClusterName, clusterv1alpha1.Pull, options)
	if errors.Is(err, karmada.ErrNoCluster) {
		return nil
	}
	return ignoreAccessEnded(err)
}

// isUsedByOtherRun returns whether another run wrote the ClusterRole of this registration last. That run completes the
// registration, or a later run resumes it.
func (g *registration) isUsedByOtherRun(ctx context.Context) (bool, error) {
	role := &rbacv1.ClusterRole{}
	found, err := g.member.get(ctx, client.ObjectKey{Name: AgentRole(g.request.Namespace)}, role)
	return found && role.Labels[RegistrationLabel] == g.request.ClusterName && !g.writer.IsLastWriter(role), err
}

// ignoreAccessEnded ignores the errors that an agent gets after its Cluster and its RBAC were deleted.
func ignoreAccessEnded(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
		return nil
	}
	return err
}
