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

// PullRequest is a request to register a cluster in pull mode.
type PullRequest struct {
	Request
	// Options are merged over the options of an existing SveltosCluster, see AgentOptions.Merge.
	Options AgentOptions
	// Revoke invalidates all earlier tokens of the cluster, even if the registration fails later.
	Revoke bool
	// Version is the value of the agent's flag --version: the release of Towline.
	Version string
}

// Validate returns an error for invalid fields, without a connection. The error names the flag.
func (r PullRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	return r.Options.Validate()
}

// RegisterPull creates the agent's identity and a SveltosCluster on the hub, and writes the manifest that starts the
// agent to out. Only the manifest has the token. A repeated call repairs the objects, adds the labels and issues a new
// token. If it fails, or ctx ends, it deletes a new SveltosCluster with all its objects. It restores a SveltosCluster
// that existed, and deletes a new registration Secret, which invalidates the token; repairs of other objects stay. It
// returns ErrPatch if the manifest cannot be patched.
func RegisterPull(ctx context.Context, hub *rest.Config, request PullRequest, out io.Writer) error {
	if err := request.Validate(); err != nil {
		return err
	}
	r, err := newRegistration(hub, request.Request)
	if err != nil {
		return err
	}
	write := func(manifest []byte) error {
		_, err := out.Write(manifest)
		return err
	}
	return r.run(ctx, func() error { return r.registerPull(ctx, hub, request, write) })
}

// registerPull does all writes on the hub, and then calls write with the manifest, unless ctx has ended.
func (r *registration) registerPull(ctx context.Context, hub *rest.Config, request PullRequest, write func([]byte) error) error {
	live, options, err := r.findPullCluster(ctx, request)
	if err != nil {
		return err
	}
	address, err := addressFor(hub, options)
	if err != nil {
		return err
	}
	agent := agentManifest{request: r.request, options: options, version: request.Version}
	if agent.patches, err = patchesFor(ctx, r.hub, r.hub, live); err != nil {
		return err
	}
	// Encode the manifest before the first write, so that a patch that cannot be applied is found.
	agent.kubeconfig = address.Kubeconfig("", deliveryNamespace(live))
	if _, err := agent.encode(); err != nil {
		return err
	}
	if err := r.ensureNamespace(ctx, &corev1.Namespace{ObjectMeta: objectMeta("", r.request.Namespace)}); err != nil {
		return err
	}
	cluster, err := r.applyPullCluster(ctx, live, options)
	if err != nil {
		return err
	}
	if request.Revoke {
		if err := r.revokeTokens(ctx); err != nil {
			return err
		}
	}
	r.mayHaveRepaired = live.UID != ""
	delivery, err := Establish(ctx, r.hub, cluster)
	if err != nil {
		return err
	}
	// The rollback deletes a new Secret, which invalidates the token.
	secret, err := r.renewRegistrationSecret(ctx, clusterOwner(cluster), delivery)
	if err != nil {
		return err
	}
	issued, err := requestManifestToken(ctx, r.hub, secret, options.manifestTokenLife())
	if err != nil {
		return err
	}
	agent.kubeconfig = address.Kubeconfig(issued.Text, delivery)
	manifest, err := agent.encode()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := write(manifest); err != nil {
		return fmt.Errorf("write the manifest: %w", err)
	}
	return nil
}

// findPullCluster reads the SveltosCluster, or returns an empty one if it does not exist. It returns the options of the
// request, merged over the cluster's, or an error if the cluster cannot be registered in pull mode now.
func (r *registration) findPullCluster(ctx context.Context, request PullRequest) (*libv1beta1.SveltosCluster, AgentOptions, error) {
	live, found, err := findCluster(ctx, r.hub, r.request)
	switch {
	case err != nil:
		return nil, AgentOptions{}, err
	case live.DeletionTimestamp != nil:
		return nil, AgentOptions{}, ErrDeregistering
	case found && !live.Spec.PullMode:
		return nil, AgentOptions{}, errors.New("it is registered in push mode already; deregister it first")
	}
	options, err := ParseAgentOptions(live.Annotations[kube.AnnotationAgentOptions])
	if err != nil {
		return nil, AgentOptions{}, err
	}
	if options, err = options.Merge(request.Options); err != nil {
		return nil, AgentOptions{}, err
	}
	return live, options, options.Validate()
}

func (r *registration) applyPullCluster(
	ctx context.Context, live *libv1beta1.SveltosCluster, options AgentOptions,
) (*libv1beta1.SveltosCluster, error) {
	desired := clusterOf(r.request, live)
	desired.Spec.PullMode = true
	// Repeat the field of an earlier registration: server-side apply removes fields that are not repeated.
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
	return desired, r.applyCluster(ctx, live, desired)
}

// clusterOf returns a desired SveltosCluster with the labels and the shard of live and r.
func clusterOf(r Request, live *libv1beta1.SveltosCluster) *libv1beta1.SveltosCluster {
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: objectMeta(r.Namespace, r.Name)}
	cluster.Labels, cluster.Annotations = map[string]string{}, map[string]string{}
	maps.Copy(cluster.Labels, live.Labels)
	maps.Copy(cluster.Labels, r.Labels)
	if shard := cmp.Or(r.Shard, live.Annotations[libv1beta1.ShardAnnotation]); shard != "" {
		cluster.Annotations[libv1beta1.ShardAnnotation] = shard
	}
	return cluster
}

// requestManifestToken requests a token of the agent's ServiceAccount that is bound to the registration Secret.
func requestManifestToken(ctx context.Context, hubClient client.Client, registration *corev1.Secret, life time.Duration) (Token, error) {
	account := client.ObjectKey{Namespace: registration.Namespace, Name: registration.Labels[registrationLabel]}
	return requestToken(ctx, hubClient, account, life, &authenticationv1.BoundObjectReference{
		APIVersion: "v1", Kind: "Secret", Name: registration.Name, UID: registration.UID,
	})
}

// requestToken requests a token of a ServiceAccount. It is bound to an object unless bound is nil. With life 0, the API
// server decides the life.
func requestToken(
	ctx context.Context, c client.Client, account client.ObjectKey, life time.Duration, bound *authenticationv1.BoundObjectReference,
) (Token, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: bound}}
	if life > 0 {
		request.Spec.ExpirationSeconds = ptr.To(int64(life / time.Second))
	}
	if err := c.SubResource("token").Create(ctx, &corev1.ServiceAccount{ObjectMeta: objectMeta(account.Namespace, account.Name)}, request); err != nil {
		return Token{}, fmt.Errorf("request a token for ServiceAccount %s: %w", account, err)
	}
	issued := ReadToken(request.Status.Token)
	issued.Expires = request.Status.ExpirationTimestamp.Time
	return issued, nil
}
