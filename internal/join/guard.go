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

// MaxTokenLife is the longest life of a token that an agent may request for itself: that of its own token.
const MaxTokenLife = 24 * time.Hour

const (
	// guardName names the policy and its binding.
	guardName = "towline-token-life"
	// forItself is true if a ServiceAccount requests a token of its own.
	forItself = "request.userInfo.username == 'system:serviceaccount:' + request.namespace + ':' + request.name"
	// isAgent is true for who may report on the cluster of its own name and not on every cluster there: the
	// ServiceAccounts of others are none of our business.
	isAgent = mayReport + ".name(request.name).check('patch').allowed() && !" + mayReport + ".check('patch').allowed()"
	// isAnchored is true for a token that is bound to the anchor Secret.
	isAnchored = "has(object.spec.boundObjectRef) && has(object.spec.boundObjectRef.kind) && object.spec.boundObjectRef.kind == 'Secret'" +
		" && has(object.spec.boundObjectRef.name) && object.spec.boundObjectRef.name == request.name + '" + anchorSuffix + "'"
	mayReport = "authorizer.group('lib.projectsveltos.io').resource('sveltosclusters').subresource('status').namespace(request.namespace)"
)

// Guard makes the hub refuse tokens that an agent requests for itself if they live longer than MaxTokenLife or are not
// bound to its anchor Secret. Rules of RBAC cannot say that: without it, whoever copies an agent's token could exchange
// it for one that lives for years, or for one that outlives a revocation. It can be run again. The hub enforces it
// within some seconds.
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
				admission.MatchCondition().WithName("for-itself").WithExpression(forItself),
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
