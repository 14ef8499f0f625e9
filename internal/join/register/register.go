package register

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// The lines that tell how far a registration is. Scripts know them.
const (
	lineChecking   = "[preflight] Running pre-flight checks"
	linePassed     = "[preflight] All pre-flight checks were passed"
	lineBootstrap  = "[karmada-agent-start] Waiting to perform the TLS Bootstrap"
	lineExists     = "[karmada-agent-start] Waiting to check cluster exists"
	lineRBAC       = "[karmada-agent-start] Assign the necessary RBAC permissions to the agent"
	lineKubeconfig = "[karmada-agent-start] Waiting to construct karmada-agent kubeconfig"
	lineObjects    = "[karmada-agent-start] Waiting the necessary secret and RBAC"
	lineDeployment = "[karmada-agent-start] Waiting karmada-agent Deployment"
	lineFailed     = "karmadactl register failed and started deleting the created resources"
)

const (
	// accessLimit is how long the rights of a new agent may take to be known on the control plane.
	accessLimit = 30 * time.Second
	// goneLimit is how long the control plane may take to let go of a Cluster that is taken back.
	goneLimit = 25 * time.Second
	// certificateGrace is how long a registration that was interrupted waits for the certificate that it has asked for,
	// and then for the rights that come with it. Without them it could not take back the Cluster which the control plane
	// makes for the one who asks.
	certificateGrace = 10 * time.Second
)

// Register registers the cluster and starts its agent there, and returns when the control plane says that the cluster
// is ready. The rights of the agent are the control plane's to give, which makes the Cluster, too. If it fails, or if
// ctx ends, everything that it made is deleted again, on both sides, and the error is the first one. What a run left
// that was killed is taken over by the next.
func Register(ctx context.Context, request Request) error {
	request, err := request.withDefaults()
	if err != nil {
		return err
	}
	g, err := newRegistration(ctx, request)
	if err != nil {
		return err
	}
	request.Out(lineChecking)
	if g.over, err = g.preflight(ctx); err != nil {
		return err
	}
	request.Out(linePassed)
	if request.DryRun {
		return nil
	}
	if err := g.run(ctx); err != nil {
		request.Progress(lineFailed)
		return g.takeBack(ctx, err)
	}
	request.Out("")
	request.Out(fmt.Sprintf("cluster(%s) is joined successfully", request.ClusterName))
	return nil
}

// registration is one run of Register.
type registration struct {
	request Request
	token   bootstrap.Token
	member  member
	ledger  *ledger
	// there is what the cluster held of an agent before, and over what of it may be written over.
	there resident
	over  replaces
	// id is the uid of the cluster's namespace kube-system.
	id string
	// identity is what the control plane issued; it is empty until it did.
	identity identity
	// hub connects with it.
	hub client.Client
	// recovered says that it is what a run left that did not get through.
	recovered bool
	// age says whether the Cluster is older than this registration.
	age age
}

// age says whether a Cluster is older than the registration, which then must not delete it.
type age int

const (
	unknown age = iota
	older
	fresh
)

// identity is the agent's way to the control plane.
type identity struct {
	kubeconfig []byte
	// request names the CertificateSigningRequest.
	request string
}

func newRegistration(ctx context.Context, request Request) (*registration, error) {
	token, err := bootstrap.ParseToken(request.Token)
	if err != nil {
		return nil, err
	}
	m, err := newMember(ctx, request.Member)
	if err != nil {
		return nil, err
	}
	return &registration{
		request: request, token: token, member: m, ledger: &ledger{member: m, attempt: string(uuid.NewUUID())},
	}, nil
}

func (g *registration) run(ctx context.Context) error {
	out := g.request.Out
	out(lineBootstrap)
	id, err := g.member.id(ctx)
	if err != nil {
		return err
	}
	g.id = id
	if err := g.identify(ctx); err != nil {
		return err
	}
	out(lineExists)
	out(lineRBAC)
	if err := g.awaitAccess(ctx); err != nil {
		return err
	}
	out(lineKubeconfig)
	m, err := g.manifest()
	if err != nil {
		return err
	}
	out(lineObjects)
	if err := g.prepare(ctx, m); err != nil {
		return err
	}
	out(lineDeployment)
	if err := g.start(ctx, m); err != nil {
		return err
	}
	if err := g.awaitReady(ctx); err != nil {
		return err
	}
	return g.finish(ctx)
}

// id returns what tells the cluster from every other one.
func (m member) id(ctx context.Context) (string, error) {
	system := &corev1.Namespace{}
	if err := m.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, system); err != nil {
		return "", fmt.Errorf("ask the cluster which one it is: %w", err)
	}
	return string(system.UID), nil
}

// identify gets the agent an identity on the control plane. That of a run which did not get through is as good as a new
// one, for which the token may not be good any more.
func (g *registration) identify(ctx context.Context) error {
	if g.over == remains && g.recover(ctx) {
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
	requester := &rest.Config{
		Host: "https://" + r.Endpoint, BearerToken: g.token.String(), TLSClientConfig: rest.TLSClientConfig{CAData: ca},
		Timeout: requestLimit, QPS: requestQPS, Burst: requestQPS,
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	asking, cancel := g.outlasting(ctx)
	defer cancel()
	certificate, err := bootstrap.RequestCertificate(asking, requester, bootstrap.CertificateRequest{
		Cluster: r.ClusterName, ID: g.id, Life: r.CertLife, Until: time.Now().Add(r.DiscoveryTimeout), Progress: r.Progress,
	})
	var denied *bootstrap.Denied
	switch {
	case errors.As(err, &denied):
		return fmt.Errorf("the control plane refuses cluster %s (%s): %w", r.ClusterName, denied.Reason, err)
	case err != nil:
		return err
	}
	made, err := kubeconfig(r.ClusterName, r.Endpoint, ca, certificate.CertPEM, certificate.KeyPEM)
	if err != nil {
		return err
	}
	if err := g.assume(ctx, identity{kubeconfig: made, request: certificate.CSR}); err != nil {
		return err
	}
	return ctx.Err()
}

// outlasting returns a context that ends certificateGrace after ctx. A renewal makes nothing that would have to be
// taken back, and ends with ctx.
func (g *registration) outlasting(ctx context.Context) (context.Context, context.CancelFunc) {
	if g.request.Renew {
		return context.WithCancel(ctx)
	}
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(certificateGrace, cancel) })
	return longer, func() { stop(); cancel() }
}

// recover assumes the identity that an earlier run left, and says whether it is still good: one of the control plane
// that the pins name, which lets it in.
func (g *registration) recover(ctx context.Context) bool {
	left := g.there.secret
	if g.pinned(left.Data[KubeconfigKey]) && g.assume(ctx, identity{kubeconfig: left.Data[KubeconfigKey], request: left.Annotations[certificateAnnotation]}) == nil {
		if cluster, err := g.cluster(ctx); err == nil && cluster.Spec.ID == g.id && cluster.DeletionTimestamp.IsZero() {
			g.recovered = true
			return true
		}
	}
	g.identity, g.hub = identity{}, nil
	return false
}

// pinned says whether a kubeconfig trusts a certificate authority that the request allows.
func (g *registration) pinned(kubeconfig []byte) bool {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return false
	}
	if len(g.request.Pins) == 0 {
		return true
	}
	known, err := bootstrap.Pins(config.CAData)
	return err == nil && slices.ContainsFunc(known, func(pin string) bool {
		return slices.ContainsFunc(g.request.Pins, func(wanted string) bool { return strings.EqualFold(pin, strings.TrimSpace(wanted)) })
	})
}

func (g *registration) assume(ctx context.Context, i identity) error {
	config, err := clientcmd.RESTConfigFromKubeConfig(i.kubeconfig)
	if err != nil {
		return fmt.Errorf("use the agent's kubeconfig: %w", err)
	}
	hub, err := connect(ctx, config)
	if err != nil {
		return fmt.Errorf("connect to the control plane: %w", err)
	}
	g.identity, g.hub = i, hub
	return nil
}

func (g *registration) cluster(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	cluster := &clusterv1alpha1.Cluster{}
	if err := g.hub.Get(ctx, client.ObjectKey{Name: g.request.ClusterName}, cluster); err != nil {
		return nil, fmt.Errorf("read Cluster %s on the control plane: %w", g.request.ClusterName, err)
	}
	return cluster, nil
}

// awaitAccess waits until the agent may read its Cluster, which takes the control plane a moment.
func (g *registration) awaitAccess(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, min(accessLimit, g.request.DiscoveryTimeout))
	defer cancel()
	var last error
	err := wait.PollUntilContextCancel(limited, pollPause, true, func(context.Context) (bool, error) {
		cluster, err := g.cluster(ctx)
		if err != nil {
			last = err
			return false, nil //nolint:nilerr // it may be let in later
		}
		if cluster.Spec.ID != g.id {
			return false, fmt.Errorf("the control plane has another cluster under the name %s: its ID is %s, and here it is %s", cluster.Name, cluster.Spec.ID, g.id)
		}
		g.age = g.ageOf(cluster)
		return true, nil
	})
	if wait.Interrupted(err) {
		return fmt.Errorf("wait for the rights of the agent on the control plane: %w", cmp.Or(ctx.Err(), last, err))
	}
	return err
}

// ageOf looks at a Cluster before its agent is started. One that has reported is in use, unless it is a run that did
// not get through which brought it so far.
func (g *registration) ageOf(cluster *clusterv1alpha1.Cluster) age {
	switch {
	case g.request.Renew, cluster.Spec.ID != g.id:
		return older
	case g.recovered:
		return fresh
	case cluster.Status.KubernetesVersion != "", cluster.Annotations[kube.AnnotationBootstrapToken] != g.token.ID:
		return older
	}
	return fresh
}

func (g *registration) manifest() (manifest, error) {
	server, _, err := rest.DefaultServerUrlFor(g.request.Member)
	if err != nil {
		return manifest{}, fmt.Errorf("read the address of the cluster: %w", err)
	}
	return manifest{
		request: g.request, attempt: g.ledger.attempt, server: server.Scheme + "://" + server.Host + trimSlash(server.Path),
		certificate: g.identity.request, kubeconfig: g.identity.kubeconfig,
	}, nil
}

func trimSlash(path string) string {
	if path == "/" {
		return ""
	}
	return path
}

// prepare makes everything but the Deployment.
func (g *registration) prepare(ctx context.Context, m manifest) error {
	if err := g.ledger.ensureNamespace(ctx, m.namespace(), g.over); err != nil {
		return err
	}
	if err := g.ledger.write(ctx, m.secret(), g.over); err != nil {
		return err
	}
	if err := g.ledger.ensureRole(ctx, m.role(), g.over); err != nil {
		return err
	}
	if err := g.ledger.write(ctx, m.account(), g.over); err != nil {
		return err
	}
	return g.ledger.ensureBinding(ctx, m.binding(), g.over)
}

// start makes the Deployment. What the agent makes then goes with it if the registration fails.
func (g *registration) start(ctx context.Context, m manifest) error {
	r := g.request
	found, err := g.member.find(ctx, client.ObjectKey{Name: r.ClusterNamespace}, &corev1.Namespace{})
	if err != nil {
		return err
	}
	if g.over != agent {
		g.ledger.note(func(ctx context.Context) error {
			g.member.awaitPods(ctx, r.Namespace)
			if err := g.member.removeLease(ctx, r.Namespace, r.ClusterName); err != nil || found && g.over == nothing {
				return err
			}
			return g.member.removeRecords(ctx, r.ClusterNamespace)
		})
	}
	return g.ledger.write(ctx, m.deployment(), g.over)
}

// finish says that the registration is through: from now on nothing is taken back or over.
func (g *registration) finish(ctx context.Context) error {
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: g.request.Namespace, Name: KubeconfigSecret}}
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"`+unfinishedAnnotation+`":null}}}`))
	if err := g.member.Patch(ctx, secret, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("note on the cluster that it is registered: %w", err)
	}
	return nil
}

// takeBack undoes on both sides what the registration made, and returns why it failed. The Cluster goes first: an agent
// that is at work by now then helps.
func (g *registration) takeBack(ctx context.Context, failure error) error {
	if ctx.Err() != nil && !errors.Is(failure, ctx.Err()) {
		failure = fmt.Errorf("%w: %w", ctx.Err(), failure)
	}
	if err := errors.Join(g.takeBackCluster(ctx), g.ledger.takeBack(ctx)); err != nil {
		if ctx.Err() != nil {
			// Of an interruption, people are only told what it interrupted.
			g.request.Progress("warning: not everything could be taken back: " + oneLine(err.Error()))
		}
		return fmt.Errorf("%w; and not everything could be taken back: %w", failure, err)
	}
	return failure
}

// takeBackCluster deletes the Cluster if it was made for this registration, and waits until it is gone.
func (g *registration) takeBackCluster(ctx context.Context) error {
	if g.hub == nil || g.age == older {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goneLimit)
	defer cancel()
	cluster, err := g.left(ctx)
	if err != nil || cluster == nil || g.age == unknown && g.ageOf(cluster) != fresh || cluster.Spec.ID != g.id {
		return err
	}
	uid := cluster.UID
	if err := g.hub.Delete(ctx, cluster, client.Preconditions{UID: &uid}); err != nil && !refused(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete Cluster %s on the control plane: %w", cluster.Name, err)
	}
	err = wait.PollUntilContextCancel(ctx, pollPause, true, func(ctx context.Context) (bool, error) {
		now, err := g.cluster(ctx)
		return refused(err) || err == nil && now.UID != uid, nil
	})
	if err != nil {
		return fmt.Errorf("delete Cluster %s on the control plane: it is not through with it yet", cluster.Name)
	}
	return nil
}

// left reads the Cluster that is to be taken back; nil: there is none. An agent whose rights were never seen to work
// may get them yet.
func (g *registration) left(ctx context.Context) (*clusterv1alpha1.Cluster, error) {
	admitted := g.age != unknown || g.recovered
	limited, cancel := context.WithTimeout(ctx, certificateGrace)
	defer cancel()
	var cluster *clusterv1alpha1.Cluster
	var failure error
	_ = wait.PollUntilContextCancel(limited, pollPause, true, func(context.Context) (bool, error) {
		cluster, failure = g.cluster(ctx)
		return admitted || !apierrors.IsForbidden(failure), nil
	})
	switch {
	case !admitted && apierrors.IsForbidden(failure):
		return nil, fmt.Errorf("the agent was not let in, and Cluster %s may be left on the control plane: %w", g.request.ClusterName, failure)
	case refused(failure):
		return nil, nil //nolint:nilnil // none is an answer
	}
	return cluster, failure
}

// refused says that the agent has no Cluster any more: its rights go with it, and its name may be somebody else's by
// then.
func refused(err error) bool {
	return apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)
}
