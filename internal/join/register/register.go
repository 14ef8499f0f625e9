package register

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/rollback"
	"github.com/towline/towline/internal/kube"
)

// The output lines of a registration. Scripts depend on them.
const (
	lineChecksStarted = "[preflight] Running pre-flight checks"
	lineChecksPassed  = "[preflight] All pre-flight checks were passed"
	lineBootstrap     = "[karmada-agent-start] Waiting to perform the TLS Bootstrap"
	lineCheckCluster  = "[karmada-agent-start] Waiting to check cluster exists"
	lineRBAC          = "[karmada-agent-start] Assign the necessary RBAC permissions to the agent"
	lineKubeconfig    = "[karmada-agent-start] Waiting to construct karmada-agent kubeconfig"
	lineObjects       = "[karmada-agent-start] Waiting the necessary secret and RBAC"
	lineDeployment    = "[karmada-agent-start] Waiting karmada-agent Deployment"
	lineFailed        = "karmadactl register failed and started deleting the created resources"
	lineRenewalFailed = "karmadactl register failed and started restoring the agent's objects on the cluster"
)

// memberCleanupTimeout limits a cleanup: the waits for the agent's pods and the garbage collector, and ten requests.
const memberCleanupTimeout = podTerminationTimeout + collectorTimeout + 10*time.Second

// Register registers the cluster, starts its agent, and waits until the control plane reports the cluster as ready. If
// it fails, or ctx ends, it rolls back its writes on both sides, and returns the first error. It completes a
// registration that was killed.
func Register(ctx context.Context, request Request) error {
	request, err := request.withDefaults()
	if err != nil {
		return err
	}
	token, err := bootstrap.ParseToken(request.Token)
	if err != nil {
		return err
	}
	m, err := newMemberClient(ctx, request.Member)
	if err != nil {
		return err
	}
	g := &registration{request: request, token: token, member: m, writer: rollback.New(m, string(uuid.NewUUID()))}
	request.Out(lineChecksStarted)
	if err := g.preflight(ctx); err != nil {
		return err
	}
	request.Out(lineChecksPassed)
	if request.DryRun {
		return nil
	}
	if err := g.run(ctx); err != nil {
		return g.rollBack(ctx, err)
	}
	request.Out("")
	request.Out(fmt.Sprintf("cluster(%s) is joined successfully", request.ClusterName))
	return nil
}

// registration is one run of Register.
type registration struct {
	request Request
	token   bootstrap.Token
	member  memberClient
	// writer writes the objects on the cluster. Its RollBack is for modeRenew only.
	writer *rollback.Writer
	// existing are the objects of an agent that preflight found. They decide the mode.
	existing agentObjects
	mode     registrationMode
	// id is the uid of the kube-system namespace of the cluster.
	id string
	// kubeconfig is the agent's kubeconfig for the control plane, csr the CertificateSigningRequest of its certificate,
	// and hub a client with it. They are empty before the certificate is issued.
	kubeconfig []byte
	csr        string
	hub        client.Client
	// usesExistingKubeconfig is true if kubeconfig is from the registration that this run resumes.
	usesExistingKubeconfig bool
	// canReadCluster is true after hub has read the Cluster. ownsCluster is true if the control plane created the Cluster
	// for this registration, or for the unfinished one that this run resumes: only then rollBack deletes the Cluster.
	canReadCluster, ownsCluster bool
}

func (g *registration) run(ctx context.Context) error {
	out := g.request.Out
	out(lineBootstrap)
	var err error
	if g.id, err = join.ClusterUID(ctx, g.member); err != nil {
		return fmt.Errorf("read the id of the cluster: %w", err)
	}
	if err := g.requestCertificate(ctx); err != nil {
		return err
	}
	out(lineCheckCluster)
	out(lineRBAC)
	if err := g.awaitAccess(ctx, min(accessTimeout, g.request.DiscoveryTimeout)); err != nil {
		return err
	}
	out(lineKubeconfig)
	if g.mode == modeRenew {
		if err := g.renewAgent(ctx); err != nil {
			return err
		}
		return g.awaitReady(ctx)
	}
	server, _, err := rest.DefaultServerUrlFor(g.request.Member)
	if err != nil {
		return fmt.Errorf("read the address of the cluster: %w", err)
	}
	input := manifestInput{
		request: g.request, attempt: g.writer.Attempt(), memberServer: server.Scheme + "://" + server.Host + strings.TrimSuffix(server.Path, "/"),
		csr: g.csr, kubeconfig: g.kubeconfig,
	}
	objects, err := input.objects()
	if err != nil {
		return err
	}
	out(lineObjects)
	if err := g.applyObjects(ctx, input.namespace(), objects); err != nil {
		return err
	}
	out(lineDeployment)
	if _, err := g.applyObject(ctx, objects[len(objects)-1]); err != nil {
		return err
	}
	if err := g.awaitReady(ctx); err != nil {
		return err
	}
	return g.removeUnfinishedMark(ctx)
}

// applyObjects writes all objects except the last one, the Deployment. The first one, the ClusterRole, reserves the
// namespace for this run, and owns the others.
func (g *registration) applyObjects(ctx context.Context, namespace *corev1.Namespace, objects []*unstructured.Unstructured) error {
	role, err := g.applyObject(ctx, objects[0])
	if err != nil {
		return err
	}
	for _, obj := range objects[1:] {
		obj.SetOwnerReferences([]metav1.OwnerReference{join.ClusterRoleOwner(role)})
	}
	if err := join.EnsureNamespace(ctx, g.member, namespace); err != nil {
		return fmt.Errorf("on the cluster: %w", err)
	}
	for _, obj := range objects[1 : len(objects)-1] {
		if _, err := g.applyObject(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

// applyObject writes an object of the agent. In modeNewAgent, it returns an error if another client created the object
// after preflight: Apply calls the function before it changes an existing object.
func (g *registration) applyObject(ctx context.Context, obj client.Object) (*unstructured.Unstructured, error) {
	live, _, err := g.writer.Apply(ctx, obj, func(live *unstructured.Unstructured) error {
		if g.mode == modeNewAgent && !g.writer.IsLastWriter(live) {
			return fmt.Errorf("write %s: it has just been made by somebody else", kube.RefOf(live))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("on the cluster: %w", err)
	}
	return live, nil
}

func (g *registration) removeUnfinishedMark(ctx context.Context) error {
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: AgentRole(g.request.Namespace)}}
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+unfinishedAnnotation+`":null}}}`))
	if err := g.member.Patch(ctx, role, patch, client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("remove the mark of an unfinished registration on the cluster: %w", err)
	}
	return nil
}

// rollBack deletes the registration on both sides, or rolls back the writes of a renewal. It returns failure, joined
// with its own errors. It deletes the Cluster first: an agent that runs already then uninstalls itself.
func (g *registration) rollBack(ctx context.Context, failure error) error {
	if ctx.Err() != nil && !errors.Is(failure, ctx.Err()) {
		failure = fmt.Errorf("%w: %w", ctx.Err(), failure)
	}
	var err error
	if g.mode == modeRenew {
		g.request.Progress(lineRenewalFailed)
		err = g.writer.RollBack(ctx) // it ignores the end of ctx
	} else {
		g.request.Progress(lineFailed)
		err = errors.Join(g.deleteCluster(ctx), g.cleanUpMember(ctx))
	}
	if err == nil {
		return failure
	}
	if ctx.Err() != nil {
		// The caller prints only the interruption.
		g.request.Progress("warning: not everything could be taken back: " + kube.OneLine(err.Error()))
	}
	return fmt.Errorf("%w; and not everything could be taken back: %w", failure, err)
}

// cleanUpMember deletes the registration on the cluster, unless another run has written it since.
func (g *registration) cleanUpMember(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), memberCleanupTimeout)
	defer cancel()
	r := g.request
	objects, err := g.member.readAgentObjects(ctx, r.Namespace, DefaultAgentDeployment)
	if err != nil || objects.role == nil || !g.writer.IsLastWriter(objects.role) {
		return err
	}
	c := cleanup{member: g.member, objects: objects, cluster: r.ClusterName, inventoryNamespace: r.ClusterNamespace, progress: func(string) {}}
	return c.run(ctx)
}
