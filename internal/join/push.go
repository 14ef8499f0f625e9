package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// The token of a registration by context, as the Sveltos surface has it.
const (
	// MemberTokenLife is the life that is asked for.
	MemberTokenLife = 5 * time.Hour
	// MemberTokenInterval is the time between two renewals.
	MemberTokenInterval = time.Hour
)

// PushRequest asks to register a cluster that the hub dials. Either Kubeconfig or Member is given.
type PushRequest struct {
	Request
	// Kubeconfig is how the hub reaches the cluster. It must hold everything it needs.
	Kubeconfig []byte
	// Member is how the operator reaches the cluster: the registration makes an identity for the hub there, and a
	// kubeconfig of it.
	Member *rest.Config
	// ServiceAccountToken gives the identity a token that does not expire, instead of one that the hub renews.
	ServiceAccountToken bool
	// Note is told, in one line, what people should know though the cluster is registered; it may be nil.
	Note func(string)
}

// Validate says what is wrong with r before anything connects. The error names the command-line flag and its value.
func (r PushRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	switch {
	case r.Member == nil && len(r.Kubeconfig) == 0:
		return errors.New("either kubeconfig or fleet-cluster-context must be specified")
	case r.Member != nil && len(r.Kubeconfig) > 0:
		return errors.New("--kubeconfig and --fleet-cluster-context exclude each other")
	case r.Member != nil:
		if _, err := addressIn(r.Member); err != nil {
			return fmt.Errorf("--fleet-cluster-context: %w", err)
		}
		return nil
	case r.ServiceAccountToken:
		return errors.New("--service-account-token needs --fleet-cluster-context")
	}
	if _, err := selfContained(r.Kubeconfig); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	return nil
}

// RegisterPush keeps a kubeconfig of the cluster on the hub, beside a SveltosCluster. It is the one given, of which it
// checks that it reaches the cluster and may work there; or it is made, with an identity on the member. Registering
// again replaces the kubeconfig and adds the labels. When it fails, or when ctx ends, what it made and changed is taken
// back, on the member too.
func RegisterPush(ctx context.Context, hub *rest.Config, r PushRequest) error {
	if err := r.Validate(); err != nil {
		return err
	}
	l, err := newLedger(hub, r.Request)
	if err != nil {
		return err
	}
	if r.Member != nil {
		return l.registerContext(ctx, r)
	}
	member, err := selfContained(r.Kubeconfig)
	if err != nil {
		return err
	}
	if err := checkReach(ctx, member); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	if err := l.registerKubeconfig(ctx, r, member); err != nil {
		return failed(ctx, r.Request, err, l.rollBack(ctx))
	}
	return nil
}

func (l *ledger) registerKubeconfig(ctx context.Context, r PushRequest, member *rest.Config) error {
	live, err := l.kubeconfigCluster(ctx)
	if err != nil {
		return err
	}
	uid, err := l.identify(ctx, r, member, live)
	if err != nil {
		return err
	}
	kubeconfig, err := minified(r.Kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	desired := clusterOf(r.Request, live)
	markMember(desired, uid)
	// What a registration by context asked for stays if this kubeconfig can be renewed.
	if hasIdentity(live) && !readToken(member.BearerToken).expires.IsZero() {
		desired.Spec.TokenRequestRenewalOption = live.Spec.TokenRequestRenewalOption
	}
	return l.keepPush(ctx, live, desired, kubeconfig)
}

// identify returns what tells the member from others, "" if that is not known. It refuses another cluster than the one
// that has the name.
func (l *ledger) identify(ctx context.Context, r PushRequest, member *rest.Config, live *libv1beta1.SveltosCluster) (uid string, err error) {
	config := rest.CopyConfig(member)
	config.Timeout = reachLimit
	memberClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return "", fmt.Errorf("connect to the cluster: %w", err)
	}
	if uid, err = memberUID(ctx, memberClient); err != nil {
		return "", err
	}
	registered := live.Annotations[kube.AnnotationMember]
	if err := sameMember(r.Request, uid, registered); err != nil {
		return "", err
	}
	if uid == "" {
		return registered, nil
	}
	own, err := memberUID(ctx, l.hubClient)
	if err != nil {
		return "", err
	}
	if own == uid && r.Note != nil {
		r.Note(fmt.Sprintf("the cluster at %s is the hub itself", member.Host))
	}
	return uid, nil
}

// markMember notes which cluster it is that was registered, if that is known.
func markMember(cluster *libv1beta1.SveltosCluster, uid string) {
	if uid != "" {
		metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationMember, uid)
	}
}

// registerContext makes the hub's identity on the member before anything on the hub refers to it.
func (l *ledger) registerContext(ctx context.Context, r PushRequest) error {
	live, err := l.kubeconfigCluster(ctx)
	if err != nil {
		return fmt.Errorf("register cluster %s: %w", r.key(), err)
	}
	uid, err := l.identify(ctx, r, r.Member, live)
	if err != nil {
		return fmt.Errorf("register cluster %s: %w", r.key(), err)
	}
	hubUID, err := HubUID(ctx, l.hubClient)
	if err != nil {
		return fmt.Errorf("register cluster %s: %w", r.key(), err)
	}
	member, err := registeredIdentity(r.Member, hubUID, client.ObjectKey{Namespace: r.Namespace, Name: r.Name})
	if err != nil {
		return fmt.Errorf("register cluster %s: %w", r.key(), err)
	}
	desired := clusterOf(r.Request, live)
	markIdentity(desired)
	markMember(desired, uid)
	if err := l.registerIdentity(ctx, r, pushStates{live, desired}, member); err != nil {
		return failed(ctx, r.Request, err, errors.Join(l.rollBack(ctx), member.rollBack(ctx)))
	}
	if r.ServiceAccountToken || live.UID == "" {
		return nil
	}
	// An earlier registration may have asked for a token that does not expire, which nobody needs from now on.
	if err := member.dropTokenSecret(ctx, member.registrationSecret()); err != nil {
		return fmt.Errorf("cluster %s is registered, but a former token that does not expire is still there; register again: %w", r.key(), err)
	}
	return nil
}

// hasIdentity says whether the registration of cluster made, or uses, an identity on the member.
func hasIdentity(cluster *libv1beta1.SveltosCluster) bool {
	return cluster.Annotations[AnnotationMemberIdentity] == "true"
}

func markIdentity(cluster *libv1beta1.SveltosCluster) {
	if cluster.Annotations == nil {
		cluster.Annotations = map[string]string{}
	}
	cluster.Annotations[AnnotationMemberIdentity] = "true"
}

// pushStates are a SveltosCluster as it is and as it is to become.
type pushStates struct{ live, desired *libv1beta1.SveltosCluster }

func (l *ledger) registerIdentity(ctx context.Context, r PushRequest, states pushStates, member *identity) error {
	if err := member.provide(ctx); err != nil {
		return err
	}
	live, desired := states.live, states.desired
	if !r.ServiceAccountToken {
		desired.Spec.TokenRequestRenewalOption = cmp.Or(live.Spec.TokenRequestRenewalOption, defaultRenewal())
	}
	text, err := member.registrationToken(ctx, r)
	if err != nil {
		return err
	}
	kubeconfig, err := accountKubeconfig(r.Member, member.account, text)
	if err != nil {
		return err
	}
	if err := awaitReach(ctx, kubeconfig); err != nil {
		return err
	}
	return l.keepPush(ctx, live, desired, kubeconfig)
}

func defaultRenewal() *libv1beta1.TokenRequestRenewalOption {
	return &libv1beta1.TokenRequestRenewalOption{
		RenewTokenRequestInterval: metav1.Duration{Duration: MemberTokenInterval},
		TokenDuration:             &metav1.Duration{Duration: MemberTokenLife},
	}
}

// pushCluster reads the SveltosCluster; it is empty if there is none.
func (l *ledger) pushCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	live, found, err := findCluster(ctx, l.hubClient, l.request)
	if err != nil {
		return nil, err
	}
	if found && live.Spec.PullMode {
		return nil, errors.New("it is registered in pull mode already; deregister it first")
	}
	return live, nil
}

// kubeconfigCluster reads the SveltosCluster that is to be reached with a kubeconfig; it is empty if there is none.
func (l *ledger) kubeconfigCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	live, err := l.pushCluster(ctx)
	if err == nil && live.Spec.WorkloadIdentity != nil {
		return nil, errors.New("it is registered with a workload identity already; deregister it first")
	}
	return live, err
}

// keepPush writes the kubeconfig and then the SveltosCluster. The key stays the one that the cluster refers to, which a
// renewal of the token may have moved: so the new kubeconfig is the one in use, and renewing goes on from it.
func (l *ledger) keepPush(ctx context.Context, live, desired *libv1beta1.SveltosCluster, kubeconfig []byte) error {
	if _, err := l.makeNamespace(ctx, desired.Namespace, nil); err != nil {
		return err
	}
	desired.Spec.KubeconfigKeyName = cmp.Or(live.Spec.KubeconfigKeyName, KubeconfigKey)
	// A cluster that was not registered by us may name a Secret, and the hub reads no other one.
	secret := &corev1.Secret{
		ObjectMeta: named(desired.Namespace, cmp.Or(live.Spec.KubeconfigName, KubeconfigSecret(desired.Name))),
		Data:       map[string][]byte{desired.Spec.KubeconfigKeyName: kubeconfig},
	}
	if live.Spec.KubeconfigName == "" {
		secret.Labels = map[string]string{registrationLabel: desired.Name}
	}
	if _, err := l.apply(ctx, secret); err != nil {
		return err
	}
	if !hasIdentity(live) {
		_, err := l.apply(ctx, desired)
		return err
	}
	// Applying undoes what it wrote, not what it left out, which therefore goes by itself.
	kept := desired.DeepCopy()
	markIdentity(kept)
	kept.Spec.TokenRequestRenewalOption = cmp.Or(desired.Spec.TokenRequestRenewalOption, live.Spec.TokenRequestRenewalOption)
	made, err := l.apply(ctx, kept)
	if err != nil {
		return err
	}
	return l.dropFormer(ctx, made, desired)
}

// dropFormer takes off the SveltosCluster what a former registration by context wrote and this one does not say.
func (l *ledger) dropFormer(ctx context.Context, made *unstructured.Unstructured, desired *libv1beta1.SveltosCluster) error {
	drop := &unstructured.Unstructured{Object: map[string]any{}}
	drop.SetGroupVersionKind(made.GroupVersionKind())
	drop.SetNamespace(made.GetNamespace())
	drop.SetName(made.GetName())
	none := drop.DeepCopy()
	if _, found, _ := unstructured.NestedMap(made.Object, "spec", "tokenRequestRenewalOption"); found && desired.Spec.TokenRequestRenewalOption == nil {
		drop.Object["spec"] = map[string]any{"tokenRequestRenewalOption": nil}
	}
	if _, found := made.GetAnnotations()[AnnotationMemberIdentity]; found && !hasIdentity(desired) {
		drop.Object["metadata"].(map[string]any)["annotations"] = map[string]any{AnnotationMemberIdentity: nil}
	}
	if reflect.DeepEqual(drop, none) {
		return nil
	}
	// Noted before the request, since a request that was cut off may have done its work.
	l.noteWrite(drop, made.DeepCopy())
	patch, err := drop.MarshalJSON()
	if err != nil {
		return fmt.Errorf("encode the change of %s: %w", describe(made), err)
	}
	if err := l.hubClient.Patch(ctx, made, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(kube.FieldManager)); err != nil {
		return fmt.Errorf("write %s: %w", describe(made), err)
	}
	return nil
}
