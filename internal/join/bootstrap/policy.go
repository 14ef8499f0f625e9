package bootstrap

import (
	"context"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// policyName is the name of the policy and of its binding.
const policyName = "towline-karmada-agents"

// EnsureAgentPolicy creates or updates the ValidatingAdmissionPolicy that limits the fields that agents may change.
// RBAC cannot limit fields. An agent must not change the labels of its Cluster, by which profiles match it, nor its id,
// credentials and finalizers. Of a Work it may change only the status, and remove its own finalizer. isNew is true if
// the API server may not enforce the policy yet. EnsureAgentPolicy returns kube.ErrNoAdmissionPolicies for a hub
// without ValidatingAdmissionPolicies. It can be repeated. hub must read from the API server.
func EnsureAgentPolicy(ctx context.Context, hub client.Client) (isNew bool, err error) {
	return kube.EnsureAdmissionPolicy(ctx, hub, policyName, kube.FixedSpec(agentPolicy()))
}

func agentPolicy() admissionv1.ValidatingAdmissionPolicySpec {
	return kube.AdmissionPolicySpec(
		[]admissionv1.RuleWithOperations{
			kube.AdmissionRule(clusterv1alpha1.GroupVersion, "clusters", admissionv1.Update),
			kube.AdmissionRule(workv1alpha1.GroupVersion, "works", admissionv1.Update),
			kube.AdmissionRule(coordinationv1.SchemeGroupVersion, "leases", admissionv1.Update),
		},
		[]admissionv1.MatchCondition{{Name: "by-an-agent", Expression: "'" + AgentsGroup + "' in request.userInfo.groups"}},
		validation("clusters", unchanged("object.metadata", "labels", "annotations", "finalizers", "ownerReferences"),
			"an agent may not change the metadata of its Cluster"),
		validation("clusters", unchanged("object.spec", "id", "syncMode", "secretRef", "impersonatorSecretRef", "insecureSkipTLSVerification",
			"proxyHeader", "taints", "resourceModels")+" && (!has(object.spec.zone) || object.spec.?zone == oldObject.spec.?zone)",
			"an agent may change only apiEndpoint, proxyURL, provider, region and zones of its Cluster, and take zone off, which zones replaces"),
		validation("works", unchanged("object.metadata", "labels", "annotations", "ownerReferences")+" && "+removesOnlyFinalizer(workv1alpha1.ExecutionFinalizer)+
			" && object.spec == oldObject.spec", "an agent may change nothing of a Work but its status and take its finalizer "+workv1alpha1.ExecutionFinalizer+" off"),
		validation("leases", unchanged("object.metadata", "labels", "finalizers", "ownerReferences"),
			"an agent may not change labels, finalizers and owners of its Lease"))
}

func validation(resource, expression, message string) admissionv1.Validation {
	return admissionv1.Validation{Expression: "request.resource.resource != '" + resource + "' || (" + expression + ")", Message: message}
}

// unchanged returns a CEL expression that is true if none of the fields of parent, "object.<path>", has changed.
func unchanged(parent string, fields ...string) string {
	var same []string
	for _, field := range fields {
		same = append(same, fmt.Sprintf("%s.?%s == oldO%s.?%s", parent, field, strings.TrimPrefix(parent, "o"), field))
	}
	return strings.Join(same, " && ")
}

// removesOnlyFinalizer returns a CEL expression that is true if at most this finalizer was removed, and none added.
func removesOnlyFinalizer(finalizer string) string {
	return fmt.Sprintf("(object.metadata.?finalizers == oldObject.metadata.?finalizers || "+
		"object.metadata.?finalizers.orValue([]) == oldObject.metadata.?finalizers.orValue([]).filter(f, f != '%s'))", finalizer)
}
