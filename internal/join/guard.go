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

// MaxTokenLife is the longest life of a token that a ServiceAccount of the hub may request for itself: that of an agent's own token.
const MaxTokenLife = 24 * time.Hour

// guardName names the policy and its binding.
const guardName = "towline-token-life"

// Guard makes the hub refuse tokens of more than MaxTokenLife that a ServiceAccount requests for itself, as agents may. Rules of RBAC cannot
// say that: without it, whoever copies an agent's token could exchange it for one that lives for years. It can be run again. The hub
// enforces it within some seconds.
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
			WithMatchConditions(admission.MatchCondition().WithName("for-itself").
				WithExpression("request.userInfo.username == 'system:serviceaccount:' + request.namespace + ':' + request.name")).
			WithValidations(admission.Validation().
				WithExpression(fmt.Sprintf("!has(object.spec.expirationSeconds) || object.spec.expirationSeconds <= %d", seconds)).
				WithMessage(fmt.Sprintf("a ServiceAccount may request a token of at most %d seconds for itself", seconds)).
				WithReason(metav1.StatusReasonForbidden)))
}

func guardBinding() *admission.ValidatingAdmissionPolicyBindingApplyConfiguration {
	return admission.ValidatingAdmissionPolicyBinding(guardName).
		WithLabels(map[string]string{"app.kubernetes.io/name": "towline"}).
		WithSpec(admission.ValidatingAdmissionPolicyBindingSpec().WithPolicyName(guardName).WithValidationActions(admissionv1.Deny))
}
