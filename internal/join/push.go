package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// The defaults for the token of a registration with PushRequest.Member, the same as in Sveltos.
const (
	// MemberTokenLife is the requested lifetime of the token.
	MemberTokenLife = 5 * time.Hour
	// MemberTokenInterval is the interval between two renewals.
	MemberTokenInterval = time.Hour
)

// PushRequest is a request to register a cluster in push mode. With Member, Kubeconfig is ignored.
type PushRequest struct {
	Request
	// Kubeconfig is the kubeconfig with which the hub connects. It must not refer to files or programs.
	Kubeconfig []byte
	// Member is the caller's configuration for the cluster. The registration creates a memberIdentity and a kubeconfig for
	// it.
	Member *rest.Config
	// ServiceAccountToken gives the identity a token that does not expire, instead of one that the hub renews. It is
	// ignored without Member.
	ServiceAccountToken bool
}

// Validate returns an error for invalid fields, without a connection. The error names the flag and its value.
func (r PushRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	if r.Member != nil {
		if _, err := clusterEntry(r.Member); err != nil {
			return fmt.Errorf("--fleet-cluster-context: %w", err)
		}
		return nil
	}
	if _, _, err := parseKubeconfig(r.Kubeconfig); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	return nil
}

// RegisterPush writes the kubeconfig of a cluster and a SveltosCluster to the hub. It checks that a given kubeconfig
// has access to the cluster and the rights that the hub needs, or it creates an identity on the member and a kubeconfig
// for it. A repeated call replaces the kubeconfig and adds the labels. If it fails, or ctx ends, it rolls back its
// writes on the hub and the member.
func RegisterPush(ctx context.Context, hub *rest.Config, request PushRequest) error {
	if err := request.Validate(); err != nil {
		return err
	}
	r, err := newRegistration(hub, request.Request)
	if err != nil {
		return err
	}
	if request.Member != nil {
		return r.registerWithIdentity(ctx, request)
	}
	member, minified, err := parseKubeconfig(request.Kubeconfig)
	if err != nil {
		return err
	}
	request.Kubeconfig = minified
	if err := checkAccess(ctx, member); err != nil {
		return fmt.Errorf("--kubeconfig: %w", err)
	}
	return r.run(ctx, func() error { return r.registerKubeconfig(ctx, request, member) })
}

func (r *registration) registerKubeconfig(ctx context.Context, request PushRequest, member *rest.Config) error {
	live, err := r.findKubeconfigCluster(ctx)
	if err != nil {
		return err
	}
	uid, err := r.findMemberUID(ctx, member, live)
	if err != nil {
		return err
	}
	desired := clusterOf(r.request, live)
	annotateMember(desired, uid)
	// Keep the renewal option of an earlier registration with Member, if the token of this kubeconfig can be renewed.
	if hasMemberIdentity(live) && !ReadToken(member.BearerToken).Expires.IsZero() {
		desired.Spec.TokenRequestRenewalOption = live.Spec.TokenRequestRenewalOption
	}
	return r.applyPush(ctx, live, desired, request.Kubeconfig)
}

// findMemberUID returns the ClusterUID of the member. If it may not be read, it returns the registered uid, or "". It
// returns an error if another member is registered with the name.
func (r *registration) findMemberUID(ctx context.Context, member *rest.Config, live *libv1beta1.SveltosCluster) (uid string, err error) {
	memberClient, _, err := NewClient(member, accessTimeout)
	if err != nil {
		return "", fmt.Errorf("connect to the cluster: %w", err)
	}
	if uid, err = memberUID(ctx, memberClient); err != nil {
		return "", err
	}
	registered := live.Annotations[kube.AnnotationMember]
	if err := checkSameMember(r.request, uid, registered); err != nil || uid == "" {
		return registered, err
	}
	return uid, nil
}

// annotateMember sets the annotation with the uid of the member, if uid is not empty.
func annotateMember(cluster *libv1beta1.SveltosCluster, uid string) {
	if uid != "" {
		metav1.SetMetaDataAnnotation(&cluster.ObjectMeta, kube.AnnotationMember, uid)
	}
}

// registerWithIdentity registers a cluster with PushRequest.Member. It writes to the member first, and then to the hub.
func (r *registration) registerWithIdentity(ctx context.Context, request PushRequest) error {
	member, err := newMemberIdentity(request.Member, client.ObjectKey{Namespace: kube.AgentNamespace, Name: memberIdentityName})
	if err != nil {
		return err
	}
	r.writer.AddUndo(member.writer.RollBack)
	live := &libv1beta1.SveltosCluster{}
	err = r.run(ctx, func() error {
		if live, err = r.findKubeconfigCluster(ctx); err != nil {
			return err
		}
		desired := clusterOf(r.request, live)
		uid, err := r.findMemberUID(ctx, request.Member, live)
		if err != nil {
			return err
		}
		annotateMember(desired, uid)
		metav1.SetMetaDataAnnotation(&desired.ObjectMeta, AnnotationMemberIdentity, "true")
		hubUID, err := ClusterUID(ctx, r.hub)
		if err != nil {
			return err
		}
		member.setCluster(hubUID, client.ObjectKey{Namespace: request.Namespace, Name: request.Name})
		if !request.ServiceAccountToken {
			desired.Spec.TokenRequestRenewalOption = cmp.Or(live.Spec.TokenRequestRenewalOption, &libv1beta1.TokenRequestRenewalOption{
				RenewTokenRequestInterval: metav1.Duration{Duration: MemberTokenInterval}, TokenDuration: &metav1.Duration{Duration: MemberTokenLife},
			})
		}
		kubeconfig, err := member.ensureKubeconfig(ctx, request)
		if err != nil {
			return err
		}
		return r.applyPush(ctx, live, desired, kubeconfig)
	})
	if err != nil || request.ServiceAccountToken || live.UID == "" {
		return err
	}
	// Delete the token Secret of an earlier registration with ServiceAccountToken.
	if err := member.deleteTokenSecret(ctx); err != nil {
		return fmt.Errorf("cluster %s is registered, but a former token that does not expire is still there; register again: %w", request.key(), err)
	}
	return nil
}

func hasMemberIdentity(cluster *libv1beta1.SveltosCluster) bool {
	return cluster.Annotations[AnnotationMemberIdentity] == "true"
}

// findPushCluster reads the SveltosCluster, which must not be in pull mode. It returns an empty one if it does not
// exist.
func (r *registration) findPushCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	live, found, err := findCluster(ctx, r.hub, r.request)
	if found && live.Spec.PullMode {
		return nil, errors.New("it is registered in pull mode already; deregister it first")
	}
	return live, err
}

// findKubeconfigCluster is findPushCluster, but the SveltosCluster must not have a workload identity.
func (r *registration) findKubeconfigCluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	live, err := r.findPushCluster(ctx)
	if err == nil && live.Spec.WorkloadIdentity != nil {
		return nil, errors.New("it is registered with a workload identity already; deregister it first")
	}
	return live, err
}

// applyPush applies the kubeconfig and then the SveltosCluster. It writes the kubeconfig to the key that the
// SveltosCluster names, which a renewal of the token may have changed: the next renewal starts with that kubeconfig.
func (r *registration) applyPush(ctx context.Context, live, desired *libv1beta1.SveltosCluster, kubeconfig []byte) error {
	if err := r.ensureNamespace(ctx, &corev1.Namespace{ObjectMeta: objectMeta("", r.request.Namespace)}); err != nil {
		return err
	}
	desired.Spec.KubeconfigKeyName = cmp.Or(live.Spec.KubeconfigKeyName, KubeconfigKey)
	// A SveltosCluster that a user created may name another Secret.
	secret := &corev1.Secret{
		ObjectMeta: objectMeta(desired.Namespace, cmp.Or(live.Spec.KubeconfigName, KubeconfigSecret(desired.Name))),
		Data:       map[string][]byte{desired.Spec.KubeconfigKeyName: kubeconfig},
	}
	if live.Spec.KubeconfigName == "" {
		secret = withRegistrationLabel(secret, desired.Name)
	}
	if err := r.apply(ctx, secret, nil); err != nil {
		return err
	}
	cluster := desired.DeepCopy()
	if err := r.applyCluster(ctx, live, cluster); err != nil {
		return err
	}
	return r.removeIdentityFields(ctx, cluster, desired)
}

// removeIdentityFields removes the fields of a registration with Member that desired does not have. Server-side apply
// does not remove fields that were written without server-side apply.
func (r *registration) removeIdentityFields(ctx context.Context, cluster, desired *libv1beta1.SveltosCluster) error {
	before := cluster.DeepCopy()
	if !hasMemberIdentity(desired) {
		delete(cluster.Annotations, AnnotationMemberIdentity)
	}
	if desired.Spec.TokenRequestRenewalOption == nil {
		cluster.Spec.TokenRequestRenewalOption = nil
	}
	if equality.Semantic.DeepEqual(before, cluster) {
		return nil
	}
	patch := func(ctx context.Context, from, to *libv1beta1.SveltosCluster) error {
		err := r.hub.Patch(ctx, to.DeepCopy(), client.MergeFrom(from), client.FieldOwner(kube.FieldManager))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("write SveltosCluster %s: %w", r.request.key(), err)
		}
		return nil
	}
	r.writer.AddUndo(func(ctx context.Context) error {
		live, found, err := findCluster(ctx, r.hub, r.request)
		if err != nil || !found || !r.writer.IsLastWriter(live) {
			return err
		}
		return patch(ctx, cluster, before)
	})
	return patch(ctx, before, cluster)
}
