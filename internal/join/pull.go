package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// PullRequest asks to register a cluster whose agent dials the hub.
type PullRequest struct {
	Request
	// Options are laid over those that the SveltosCluster has, and kept there.
	Options AgentOptions
	// Revoke makes every token that was issued for the cluster before worthless. That is not taken back when the
	// registration fails.
	Revoke bool
	// AgentImage is the container image of the agent if the options name none. Default: DefaultAgentImage.
	AgentImage string
	// Version is the release of Towline that the manifest is told to be of.
	Version string
}

// Validate says what is wrong with r before anything connects. The error names the command-line flag.
func (r PullRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	return r.Options.Validate()
}

// RegisterPull makes the cluster's identity and its SveltosCluster on the hub, and writes to out the manifest that
// starts the agent. Registering again repairs what is there, adds the labels and gives a new token. When it fails, or
// when ctx ends, what it made and changed is taken back. The token is in the manifest and nowhere else. It fails with
// ErrPatch if the manifest cannot be patched as it should be.
func RegisterPull(ctx context.Context, hub *rest.Config, r PullRequest, out io.Writer) error {
	if err := r.Validate(); err != nil {
		return err
	}
	l, err := newLedger(hub, r.Request)
	if err != nil {
		return err
	}
	if err := l.registerPull(ctx, hub, r, out); err != nil {
		undone := l.rollBack(ctx)
		if r.Revoke && undone == nil {
			// That is for good, so that not everything is as it was.
			return fmt.Errorf("register cluster %s: %w", r.key(), err)
		}
		return failed(ctx, r.Request, err, undone)
	}
	return nil
}

func (l *ledger) registerPull(ctx context.Context, hub *rest.Config, r PullRequest, out io.Writer) error {
	live, err := l.findPullCluster(ctx)
	if err != nil {
		return err
	}
	options, err := optionsOf(live)
	if err != nil {
		return err
	}
	options = options.Merge(r.Options)
	if err := options.Validate(); err != nil {
		return err
	}
	address, err := addressFor(hub, options)
	if err != nil {
		return err
	}
	agent := agentManifest{request: l.request, options: options, image: r.AgentImage, version: r.Version}
	if agent.patches, err = patchesFor(ctx, l.hubClient, live); err != nil {
		return err
	}
	if _, err := l.makeNamespace(ctx, r.Namespace, nil); err != nil {
		return err
	}
	cluster, err := l.applyPullCluster(ctx, live, options)
	if err != nil {
		return err
	}
	if r.Revoke {
		if err := l.revokeAndEstablish(ctx, cluster); err != nil {
			return err
		}
	}
	delivery, err := l.establish(ctx, cluster)
	if err != nil {
		return err
	}
	secret, err := l.renewRegistration(ctx, ownerOf(cluster), delivery)
	if err != nil {
		return err
	}
	token, err := l.issue(ctx, secret, options)
	if err != nil {
		return err
	}
	agent.kubeconfig = address.kubeconfig(token, delivery)
	return agent.print(ctx, out)
}

// print writes the manifest to out, unless ctx has ended.
func (m agentManifest) print(ctx context.Context, out io.Writer) error {
	manifest, err := m.encode()
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

// findPullCluster reads the SveltosCluster, which is empty if there is none, and refuses one that cannot be registered
// now.
func (l *ledger) findPullCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	live, found, err := findCluster(ctx, l.hubClient, l.request)
	switch {
	case err != nil:
		return nil, err
	case live.DeletionTimestamp != nil:
		return nil, ErrDeparting
	case found && !live.Spec.PullMode:
		return nil, errors.New("it is registered in push mode already; deregister it first")
	}
	return live, nil
}

// applyPullCluster writes the SveltosCluster and returns it as it is then.
func (l *ledger) applyPullCluster(
	ctx context.Context, live *libv1beta1.SveltosCluster, options AgentOptions,
) (*libv1beta1.SveltosCluster, error) {
	desired := clusterOf(l.request, live)
	desired.Spec.PullMode = true
	// What an earlier registration wrote and this one does not would go.
	if delivery := live.Annotations[kube.AnnotationDeliveryNS]; delivery != "" {
		desired.Annotations[kube.AnnotationDeliveryNS] = delivery
	}
	encoded, err := options.Encode()
	if err != nil {
		return nil, err
	}
	if encoded != "" {
		desired.Annotations[kube.AnnotationAgentOptions] = encoded
	}
	if _, err := l.apply(ctx, desired); err != nil {
		return nil, err
	}
	return l.liveCluster(ctx)
}

// revokeAndEstablish revokes the cluster's tokens and makes the identity anew, for good: undoing the rest of the
// registration leaves it alone.
func (l *ledger) revokeAndEstablish(ctx context.Context, cluster *libv1beta1.SveltosCluster) error {
	forGood := &ledger{hubClient: l.hubClient, request: l.request}
	if err := forGood.revoke(ctx); err != nil {
		return err
	}
	if l.undoCluster != nil {
		return nil
	}
	_, err := forGood.establish(ctx, cluster.DeepCopy())
	return err
}

// issue requests a token for a manifest. It is bound to the registration Secret, on which its end is noted.
func (l *ledger) issue(ctx context.Context, secret *corev1.Secret, options AgentOptions) (string, error) {
	life, err := options.manifestTokenLife()
	if err != nil {
		return "", err
	}
	issued, err := requestToken(ctx, l.hubClient, secret, life)
	if err != nil {
		return "", err
	}
	return issued.text, noteExpiry(ctx, l.hubClient, secret, issued.expires)
}

// clusterOf returns what every registration says of a SveltosCluster: its old and new labels, and its shard.
func clusterOf(r Request, live *libv1beta1.SveltosCluster) *libv1beta1.SveltosCluster {
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: named(r.Namespace, r.Name)}
	cluster.Labels, cluster.Annotations = map[string]string{}, map[string]string{}
	maps.Copy(cluster.Labels, live.Labels)
	maps.Copy(cluster.Labels, r.Labels)
	if shard := cmp.Or(r.Shard, live.Annotations[libv1beta1.ShardAnnotation]); shard != "" {
		cluster.Annotations[libv1beta1.ShardAnnotation] = shard
	}
	return cluster
}

// requestToken requests a token of the ServiceAccount of the cluster to which the registration Secret belongs. It dies
// with the Secret.
func requestToken(ctx context.Context, hubClient client.Client, registration *corev1.Secret, life time.Duration) (token, error) {
	account := &corev1.ServiceAccount{ObjectMeta: named(registration.Namespace, registration.Labels[registrationLabel])}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(life / time.Second)),
		BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Secret", Name: registration.Name, UID: registration.UID,
		},
	}}
	if err := hubClient.SubResource("token").Create(ctx, account, request); err != nil {
		return token{}, fmt.Errorf("request a token for ServiceAccount %s: %w", client.ObjectKeyFromObject(account), err)
	}
	issued := readToken(request.Status.Token)
	issued.expires = request.Status.ExpirationTimestamp.Time
	return issued, nil
}
