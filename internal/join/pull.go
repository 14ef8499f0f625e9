package join

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// ManifestTokenLife is how long the token in a registration manifest lives. The agent exchanges it as soon as it starts, so this bounds
// the time between registering and applying the manifest.
const ManifestTokenLife = time.Hour

// PullRequest asks to register a cluster whose agent dials the hub.
type PullRequest struct {
	Request
	// AgentImage is the container image of the agent. Default: DefaultAgentImage.
	AgentImage string
	// HubURL is the https address under which the agent reaches the hub. Default: the one that the registration itself uses.
	HubURL string
	// Version is the release of Towline that the manifest is told to be of.
	Version string
}

// Validate says what is wrong with r before anything connects. The error names the command-line flag and its value.
func (r PullRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	if r.HubURL == "" {
		return nil
	}
	address, err := url.Parse(r.HubURL)
	if err != nil || address.Scheme != "https" || address.Host == "" {
		return fmt.Errorf("--management-cluster-url: %q is not an https:// address", r.HubURL)
	}
	return nil
}

// RegisterPull makes the cluster's identity and its SveltosCluster on the hub, and writes to out the manifest that starts the agent.
// Registering again repairs what is there, adds the labels and gives a new token. When it fails, or when ctx ends, what it made
// and changed is taken back. The token is in the manifest and nowhere else.
func RegisterPull(ctx context.Context, hub *rest.Config, r PullRequest, out io.Writer) error {
	if err := r.Validate(); err != nil {
		return err
	}
	address, err := addressOf(hub, r.HubURL)
	if err != nil {
		return err
	}
	l, err := newLedger(hub, r.Request)
	if err != nil {
		return err
	}
	if err := l.registerPull(ctx, r, address, out); err != nil {
		return errors.Join(fmt.Errorf("register cluster %s: %w", r.key(), err), l.rollBack(ctx))
	}
	return nil
}

func (l *ledger) registerPull(ctx context.Context, r PullRequest, address hubAddress, out io.Writer) error {
	cluster, found, err := findCluster(ctx, l.hubClient, r.Request)
	if err != nil {
		return err
	}
	if found && !cluster.Spec.PullMode {
		return errors.New("it is registered in push mode already; deregister it first")
	}
	delivery, err := l.claimDelivery(ctx, r.Request, cluster)
	if err != nil {
		return err
	}
	owner, err := l.applyPullCluster(ctx, r.Request, cluster, delivery)
	if err != nil {
		return err
	}
	if err := l.makeIdentity(ctx, owner, delivery); err != nil {
		return err
	}
	token, err := l.requestToken(ctx, r.Request)
	if err != nil {
		return err
	}
	manifest, err := manifestOf(r, address.kubeconfig(token, delivery))
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, err := out.Write(manifest); err != nil {
		return fmt.Errorf("write the manifest: %w", err)
	}
	return nil
}

// makeIdentity makes what the agent needs on the hub. What lives beside the SveltosCluster belongs to it, and goes with it.
func (l *ledger) makeIdentity(ctx context.Context, owner metav1.OwnerReference, delivery string) error {
	// It is everybody's, as the Role in it is: it stays when a registration is taken back.
	if _, err := l.createNamespace(ctx, kube.AgentNamespace, nil); err != nil {
		return err
	}
	if err := l.makeSharedRole(ctx); err != nil {
		return err
	}
	for _, obj := range identityObjects(l.request, delivery) {
		if obj.GetNamespace() == l.request.Namespace {
			obj.SetOwnerReferences([]metav1.OwnerReference{owner})
		}
		if err := l.own(ctx, obj); err != nil {
			return err
		}
	}
	return nil
}

// makeSharedRole makes the Role that is the same for all agents: it stays when a registration is taken back.
func (l *ledger) makeSharedRole(ctx context.Context) error {
	desired, err := toUnstructured(l.hubClient.Scheme(), role(kube.AgentNamespace, sharedRole, sharedRules()))
	if err != nil {
		return err
	}
	err = l.hubClient.Apply(ctx, client.ApplyConfigurationFromUnstructured(desired), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if err != nil {
		return fmt.Errorf("write Role %s/%s: %w", kube.AgentNamespace, sharedRole, err)
	}
	return nil
}

// applyPullCluster writes the SveltosCluster and returns the reference by which objects belong to it.
func (l *ledger) applyPullCluster(
	ctx context.Context, r Request, live *libv1beta1.SveltosCluster, delivery string,
) (metav1.OwnerReference, error) {
	desired := clusterOf(r, live)
	desired.Spec.PullMode = true
	if delivery != r.Namespace {
		desired.Annotations[kube.AnnotationDeliveryNS] = delivery
	}
	made, err := l.apply(ctx, desired)
	if err != nil {
		return metav1.OwnerReference{}, err
	}
	return metav1.OwnerReference{APIVersion: made.GetAPIVersion(), Kind: made.GetKind(), Name: made.GetName(), UID: made.GetUID()}, nil
}

// clusterOf returns what every registration says of a SveltosCluster: its old and new labels.
func clusterOf(r Request, live *libv1beta1.SveltosCluster) *libv1beta1.SveltosCluster {
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: named(r.Namespace, r.Name)}
	cluster.Labels, cluster.Annotations = map[string]string{}, map[string]string{}
	maps.Copy(cluster.Labels, live.Labels)
	maps.Copy(cluster.Labels, r.Labels)
	return cluster
}

func (l *ledger) requestToken(ctx context.Context, r Request) (string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: named(r.Namespace, r.Name)}
	request := &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(ManifestTokenLife / time.Second))},
	}
	if err := l.hubClient.SubResource("token").Create(ctx, account, request); err != nil {
		return "", fmt.Errorf("request a token for ServiceAccount %s: %w", client.ObjectKeyFromObject(account), err)
	}
	return request.Status.Token, nil
}

// hubAddress is how an agent reaches the hub.
type hubAddress struct {
	server     string
	serverName string
	ca         []byte
}

// addressOf reads the hub's address off the configuration that the registration itself uses; override replaces the URL.
func addressOf(hub *rest.Config, override string) (hubAddress, error) {
	address := hubAddress{server: hub.Host, serverName: hub.ServerName, ca: hub.CAData}
	if override != "" {
		address.server = override
	}
	if hub.Insecure {
		return address, errors.New("the current kubeconfig does not verify the hub's certificate (insecure-skip-tls-verify), and an agent must")
	}
	if len(address.ca) == 0 && hub.CAFile != "" {
		ca, err := os.ReadFile(hub.CAFile)
		if err != nil {
			return address, fmt.Errorf("read the hub's certificate authority: %w", err)
		}
		address.ca = ca
	}
	return address, nil
}
