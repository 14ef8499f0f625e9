package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// AuthoritySecret returns the name of the Secret with the CA certificates of a cluster with a workload identity.
func AuthoritySecret(cluster string) string { return cluster + "-sveltos-ca" }

// WorkloadRequest is a request to register a cluster to which the hub connects with its cloud identity.
type WorkloadRequest struct {
	Request
	// Identity has the provider, the endpoint and the cluster's identifiers. An optional field that is not set keeps its
	// registered value.
	Identity libv1beta1.WorkloadIdentity
	// CA are the CA certificates of the endpoint, in PEM. nil keeps the registered reference to a CA; without one, the hub
	// uses the CA certificates of its system.
	CA []byte
}

// Validate returns an error for invalid fields, without a connection. The error names the command-line flag.
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
	for _, required := range requiredFlags(r.Identity) {
		if required.value == "" {
			return fmt.Errorf("%s is required", required.flag)
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

type flagValue struct{ flag, value string }

// requiredFlags returns the required flags of the provider with their values, or nil without a provider.
func requiredFlags(w libv1beta1.WorkloadIdentity) []flagValue {
	switch {
	case w.AWS != nil:
		return []flagValue{{"--eks-cluster-name", w.AWS.ClusterName}}
	case w.GCP != nil:
		return []flagValue{{"--project-id", w.GCP.ProjectID}, {"--gke-cluster-name", w.GCP.ClusterName}, {"--location", w.GCP.Location}}
	case w.Azure != nil:
		return []flagValue{{"--tenant-id", w.Azure.TenantID}, {"--client-id", w.Azure.ClientID}}
	}
	return nil
}

// RegisterWorkload creates or changes a SveltosCluster to which the hub connects with its cloud identity. Only the hub
// can check the access; it reports the result in the status. A repeated call changes the fields that the request sets,
// and adds its labels. If it fails, or ctx ends, it rolls back its writes.
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
	live, err := r.findPushCluster(ctx)
	if err != nil {
		return err
	}
	identity := request.Identity.DeepCopy()
	if live.UID != "" {
		if err := keepIdentity(identity, live.Spec.WorkloadIdentity); err != nil {
			return err
		}
	}
	if err := r.ensureNamespace(ctx, &corev1.Namespace{ObjectMeta: objectMeta("", r.request.Namespace)}); err != nil {
		return err
	}
	if request.CA != nil {
		secret := &corev1.Secret{ObjectMeta: objectMeta(request.Namespace, AuthoritySecret(request.Name)), Data: map[string][]byte{fleet.AuthorityKey: request.CA}}
		if err := r.applyOwn(ctx, secret); err != nil {
			return err
		}
		identity.CASecretRef = &corev1.SecretReference{Namespace: secret.Namespace, Name: secret.Name}
	}
	desired := clusterOf(request.Request, live)
	desired.Spec.WorkloadIdentity = identity
	return r.applyCluster(ctx, live, desired)
}

// keepIdentity copies unset optional fields, and the reference to the CA, from live to requested. It returns an error
// if live is nil or has another provider.
func keepIdentity(requested, live *libv1beta1.WorkloadIdentity) error {
	if live == nil {
		return errors.New("it is registered without a workload identity already; deregister it first")
	}
	if requested.Provider != live.Provider {
		return fmt.Errorf("it is registered with a workload identity of %s already; deregister it first", live.Provider)
	}
	text, err := json.Marshal(requested)
	if err != nil {
		return fmt.Errorf("encode the workload identity: %w", err)
	}
	live.DeepCopyInto(requested)
	return json.Unmarshal(text, requested) // keeps the fields that the text does not have
}
