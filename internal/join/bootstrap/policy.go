package bootstrap

import (
	"context"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	admission "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/kubernetes"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

// policyName names the policy and its binding.
const policyName = "towline-karmada-agents"

// guard makes the hub refuse what agents may write by the rules of RBAC, which know objects and not their fields, and must not: labels, by which
// profiles find a Cluster, its id, credentials and finalizers, and everything of a Work but its status and the finalizer of who executes it.
func guard(ctx context.Context, clientset kubernetes.Interface) error {
	options := metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true}
	if _, err := clientset.AdmissionregistrationV1().ValidatingAdmissionPolicies().Apply(ctx, agentsPolicy(), options); err != nil {
		return fmt.Errorf("write ValidatingAdmissionPolicy %s: %w", policyName, err)
	}
	if _, err := clientset.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Apply(ctx, agentsBinding(), options); err != nil {
		return fmt.Errorf("write ValidatingAdmissionPolicyBinding %s: %w", policyName, err)
	}
	return nil
}

func agentsPolicy() *admission.ValidatingAdmissionPolicyApplyConfiguration {
	rule := func(group, version, resource string) *admission.NamedRuleWithOperationsApplyConfiguration {
		return admission.NamedRuleWithOperations().WithAPIGroups(group).WithAPIVersions(version).WithOperations(admissionv1.Update).WithResources(resource)
	}
	clusters, works := clusterv1alpha1.GroupVersion, workv1alpha1.GroupVersion
	return admission.ValidatingAdmissionPolicy(policyName).
		WithLabels(map[string]string{"app.kubernetes.io/name": "towline"}).
		WithSpec(admission.ValidatingAdmissionPolicySpec().
			WithFailurePolicy(admissionv1.Fail).
			WithMatchConstraints(admission.MatchResources().WithResourceRules(
				rule(clusters.Group, clusters.Version, "clusters"),
				rule(works.Group, works.Version, "works"),
				rule("coordination.k8s.io", "v1", "leases"))).
			WithMatchConditions(admission.MatchCondition().WithName("by-an-agent").
				WithExpression("'"+AgentsGroup+"' in request.userInfo.groups")).
			WithValidations(
				held("clusters", unchanged("object.metadata", "labels", "annotations", "finalizers", "ownerReferences"),
					"an agent may not change the metadata of its Cluster"),
				held("clusters", unchanged("object.spec", "id", "syncMode", "secretRef", "impersonatorSecretRef", "insecureSkipTLSVerification",
					"proxyHeader", "zone", "taints", "resourceModels"),
					"an agent may change only apiEndpoint, proxyURL, provider, region and zones of its Cluster"),
				held("works", unchanged("object.metadata", "labels", "annotations", "ownerReferences")+" && "+onlyFinalizer(workv1alpha1.ExecutionFinalizer)+
					" && object.spec == oldObject.spec", "an agent may change nothing of a Work but its status and take its finalizer "+workv1alpha1.ExecutionFinalizer+" off"),
				held("leases", unchanged("object.metadata", "labels", "finalizers", "ownerReferences"),
					"an agent may not change labels, finalizers and owners of its Lease")))
}

func held(resource, expression, message string) *admission.ValidationApplyConfiguration {
	return admission.Validation().
		WithExpression("request.resource.resource != '" + resource + "' || (" + expression + ")").
		WithMessage(message).
		WithReason(metav1.StatusReasonForbidden)
}

// unchanged is true if none of the fields of parent has changed.
func unchanged(parent string, fields ...string) string {
	var same []string
	for _, field := range fields {
		same = append(same, fmt.Sprintf("%s.?%s == oldO%s.?%s", parent, field, strings.TrimPrefix(parent, "o"), field))
	}
	return strings.Join(same, " && ")
}

// onlyFinalizer is true if no finalizer came, and none but this one went.
func onlyFinalizer(finalizer string) string {
	return fmt.Sprintf("(object.metadata.?finalizers == oldObject.metadata.?finalizers || "+
		"object.metadata.?finalizers.orValue([]) == oldObject.metadata.?finalizers.orValue([]).filter(f, f != '%s'))", finalizer)
}

func agentsBinding() *admission.ValidatingAdmissionPolicyBindingApplyConfiguration {
	return admission.ValidatingAdmissionPolicyBinding(policyName).
		WithLabels(map[string]string{"app.kubernetes.io/name": "towline"}).
		WithSpec(admission.ValidatingAdmissionPolicyBindingSpec().WithPolicyName(policyName).WithValidationActions(admissionv1.Deny))
}
