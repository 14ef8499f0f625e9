package join

import (
	"context"
	"fmt"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	admission "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/kube"
)

// MaxTokenLife is the maximum life of a token that an agent requests. Guard enforces it.
const MaxTokenLife = 24 * time.Hour

const (
	// guardName is the name of the policy and of its binding.
	guardName = "towline-token-life"
	// isOwnToken is true if a ServiceAccount requests a token for itself.
	isOwnToken = "request.userInfo.username == 'system:serviceaccount:' + request.namespace + ':' + request.name"
	// isAgent is true for a user who may patch the status of this cluster only: not for an administrator, and not for a
	// ServiceAccount without rights for the status.
	isAgent = mayReport + ".name(request.name).check('patch').allowed() && !" + mayReport + ".check('patch').allowed()"
	// isAnchored is true for the request of a token that is bound to the anchor Secret.
	isAnchored = "has(object.spec.boundObjectRef) && has(object.spec.boundObjectRef.kind) && object.spec.boundObjectRef.kind == 'Secret'" +
		" && has(object.spec.boundObjectRef.name) && object.spec.boundObjectRef.name == request.name + '" + anchorSuffix + "'"
	// mayReport is the authorizer check for the status of SveltosClusters in the account's namespace.
	mayReport = "authorizer.group('lib.projectsveltos.io').resource('sveltosclusters').subresource('status').namespace(request.namespace)"
)

// Guard creates or updates a ValidatingAdmissionPolicy and its binding on the hub. The policy denies an agent's request
// of a token for itself if the life is longer than MaxTokenLife, or if the token is not bound to the agent's anchor
// Secret. RBAC cannot restrict this: the holder of a copied token could request a token that is valid for years, or
// that stays valid after a revocation. The API server enforces a new policy after some seconds.
func Guard(ctx context.Context, hub *rest.Config) error {
	clientset, err := kubernetes.NewForConfig(hub)
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	options := metav1.ApplyOptions{FieldManager: kube.FieldManager, Force: true}
	if _, err := clientset.AdmissionregistrationV1().ValidatingAdmissionPolicies().Apply(ctx, guardPolicy(), options); err != nil {
		return fmt.Errorf("write ValidatingAdmissionPolicy %s: %w", guardName, err)
	}
	if _, err := clientset.AdmissionregistrationV1().ValidatingAdmissionPolicyBindings().Apply(ctx, guardBinding(), options); err != nil {
		return fmt.Errorf("write ValidatingAdmissionPolicyBinding %s: %w", guardName, err)
	}
	return nil
}

func guardPolicy() *admission.ValidatingAdmissionPolicyApplyConfiguration {
	seconds := int64(MaxTokenLife / time.Second)
	return admission.ValidatingAdmissionPolicy(guardName).
		WithLabels(map[string]string{"app.kubernetes.io/name": "towline"}).
		WithSpec(admission.ValidatingAdmissionPolicySpec().
			WithFailurePolicy(admissionv1.Fail).
			WithMatchConstraints(admission.MatchResources().WithResourceRules(admission.NamedRuleWithOperations().
				WithAPIGroups("").WithAPIVersions("v1").WithOperations(admissionv1.Create).WithResources("serviceaccounts/token"))).
			WithMatchConditions(
				admission.MatchCondition().WithName("for-itself").WithExpression(isOwnToken),
				admission.MatchCondition().WithName("is-an-agent").WithExpression(isAgent)).
			WithValidations(
				admission.Validation().
					WithExpression(fmt.Sprintf("!has(object.spec.expirationSeconds) || object.spec.expirationSeconds <= %d", seconds)).
					WithMessage(fmt.Sprintf("an agent may request a token of at most %d seconds for itself", seconds)).
					WithReason(metav1.StatusReasonForbidden),
				admission.Validation().
					WithExpression(isAnchored).
					WithMessage("an agent may request only tokens that are bound to Secret <cluster>"+anchorSuffix+" for itself").
					WithReason(metav1.StatusReasonForbidden)))
}

func guardBinding() *admission.ValidatingAdmissionPolicyBindingApplyConfiguration {
	return admission.ValidatingAdmissionPolicyBinding(guardName).
		WithLabels(map[string]string{"app.kubernetes.io/name": "towline"}).
		WithSpec(admission.ValidatingAdmissionPolicyBindingSpec().WithPolicyName(guardName).WithValidationActions(admissionv1.Deny))
}
