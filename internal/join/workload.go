package join

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// AuthoritySecret returns the name of the Secret with the certificate authority of a cluster that is reached with a
// workload identity.
func AuthoritySecret(cluster string) string { return cluster + "-sveltos-ca" }

// WorkloadRequest asks to register a cluster that the hub dials with its own cloud identity.
type WorkloadRequest struct {
	Request
	// Identity says which cluster it is at which provider. What is optional and left out stays what the SveltosCluster
	// says already.
	Identity libv1beta1.WorkloadIdentity
	// CA is the certificate authority of the endpoint, in PEM. Default: the one that the SveltosCluster refers to, or else
	// those of the hub's system.
	CA []byte
}

// Validate says what is wrong with r before anything connects. The error names the command-line flag and its value.
func (r WorkloadRequest) Validate() error {
	if err := r.Request.Validate(); err != nil {
		return err
	}
	if r.Identity.Endpoint == "" {
		return errors.New("--endpoint is required")
	}
	if _, err := fleet.ParseEndpoint(r.Identity.Endpoint); err != nil {
		return fmt.Errorf("--endpoint: %w", err)
	}
	for _, given := range requiredOf(r.Identity) {
		if given.value == "" {
			return fmt.Errorf("%s is required", given.flag)
		}
	}
	if err := fleet.ValidateIdentity(&r.Identity); err != nil {
		return err
	}
	if r.CA == nil {
		return nil
	}
	if _, err := cert.ParseCertsPEM(r.CA); err != nil {
		return fmt.Errorf("--ca-file: %w", err)
	}
	return nil
}

// given is what the command line says.
type given struct{ flag, value string }

// requiredOf returns what no cluster of the provider can do without.
func requiredOf(w libv1beta1.WorkloadIdentity) []given {
	switch {
	case w.AWS != nil:
		return []given{{"--eks-cluster-name", w.AWS.ClusterName}}
	case w.GCP != nil:
		return []given{{"--project-id", w.GCP.ProjectID}, {"--gke-cluster-name", w.GCP.ClusterName}, {"--location", w.GCP.Location}}
	case w.Azure != nil:
		return []given{{"--tenant-id", w.Azure.TenantID}, {"--client-id", w.Azure.ClientID}}
	}
	return nil
}

// RegisterWorkload makes a SveltosCluster that the hub dials with its own cloud identity. Whether the cluster lets the
// hub in only the hub can find out; it says so in the status. Registering again changes what is given and adds the
// labels. When it fails, or when ctx ends, what it made and changed is taken back.
func RegisterWorkload(ctx context.Context, hub *rest.Config, request WorkloadRequest) error {
	if err := request.Validate(); err != nil {
		return err
	}
	r, err := newRegistration(hub, request.Request)
	if err != nil {
		return err
	}
	return r.run(ctx, func() error { return r.registerWorkload(ctx, request) })
}

func (r *registration) registerWorkload(ctx context.Context, request WorkloadRequest) error {
	live, err := r.pushCluster(ctx)
	if err != nil {
		return err
	}
	identity := request.Identity.DeepCopy()
	if live.UID != "" {
		if err := keepIdentity(identity, live.Spec.WorkloadIdentity); err != nil {
			return err
		}
	}
	namespace := &corev1.Namespace{ObjectMeta: named("", request.Namespace)}
	if err := ensureNamespace(ctx, r.hub, r.log, r.resources, namespace); err != nil {
		return err
	}
	if request.CA != nil {
		secret := &corev1.Secret{ObjectMeta: named(request.Namespace, AuthoritySecret(request.Name)), Data: map[string][]byte{fleet.AuthorityKey: request.CA}}
		if err := r.applyOwn(ctx, secret); err != nil {
			return err
		}
		identity.CASecretRef = &corev1.SecretReference{Namespace: secret.Namespace, Name: secret.Name}
	}
	desired := clusterOf(request.Request, live)
	desired.Spec.WorkloadIdentity = identity
	return r.applyCluster(ctx, live, desired)
}

// keepIdentity adds to what is asked for what the cluster has and the request leaves out.
func keepIdentity(asked, live *libv1beta1.WorkloadIdentity) error {
	if live == nil {
		return errors.New("it is registered without a workload identity already; deregister it first")
	}
	if asked.Provider != live.Provider {
		return fmt.Errorf("it is registered with a workload identity of %s already; deregister it first", live.Provider)
	}
	asked.CASecretRef = live.CASecretRef
	switch {
	case asked.AWS != nil && live.AWS != nil:
		asked.AWS.RoleARN = cmp.Or(asked.AWS.RoleARN, live.AWS.RoleARN)
		asked.AWS.Region = cmp.Or(asked.AWS.Region, live.AWS.Region)
	case asked.Azure != nil && live.Azure != nil:
		asked.Azure.SubscriptionID = cmp.Or(asked.Azure.SubscriptionID, live.Azure.SubscriptionID)
		asked.Azure.ResourceGroup = cmp.Or(asked.Azure.ResourceGroup, live.Azure.ResourceGroup)
		asked.Azure.ClusterName = cmp.Or(asked.Azure.ClusterName, live.Azure.ClusterName)
	}
	return nil
}
