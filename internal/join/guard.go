package join

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	admission "k8s.io/client-go/applyconfigurations/admissionregistration/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// MaxTokenLife is the maximum life of a token that an agent requests. The hub's admission policy enforces it.
const MaxTokenLife = 24 * time.Hour

const (
	// tokenPolicyName and summaryPolicyName are the names of the policies and of their bindings.
	tokenPolicyName   = "towline-token-life"
	summaryPolicyName = "towline-cluster-summaries"
	// audienceAccount is the ServiceAccount whose token shows the audiences of the API server.
	audienceAccount = "towline-audiences"
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

// ErrNoAdmissionPolicies is returned for a hub without ValidatingAdmissionPolicies, which Kubernetes has since 1.30.
// Agents of such a hub could not be limited, so none is registered.
var ErrNoAdmissionPolicies = errors.New("the hub has no ValidatingAdmissionPolicies (Kubernetes 1.30), which limit what agents may do")

// checkAdmissionPolicies returns ErrNoAdmissionPolicies if the hub has none.
func checkAdmissionPolicies(ctx context.Context, hub client.Client) error {
	if err := ctx.Err(); err != nil {
		return err // the discovery takes no context
	}
	_, err := hub.RESTMapper().RESTMapping(schema.GroupKind{Group: admissionv1.GroupName, Kind: "ValidatingAdmissionPolicy"}, "v1")
	if meta.IsNoMatchError(err) {
		return ErrNoAdmissionPolicies
	}
	if err != nil {
		return fmt.Errorf("discover ValidatingAdmissionPolicies: %w", err)
	}
	return nil
}

// EnsureAdmissionPolicies creates or updates the ValidatingAdmissionPolicies of the hub and their bindings: the policy
// for the tokens of agents, and summaryPolicy. The former denies an agent's request of a token for itself if the life
// is longer than MaxTokenLife, if the token is not bound to the agent's anchor Secret, or if it is for another audience
// than the API server. RBAC cannot restrict this: the holder of a copied token could request a token that is valid for
// years, that stays valid after a revocation, or that other systems accept which trust the issuer of the hub, such as a
// cloud. The API server enforces a new policy after some seconds. It returns ErrNoAdmissionPolicies for a hub without
// ValidatingAdmissionPolicies.
func EnsureAdmissionPolicies(ctx context.Context, hub *rest.Config) error {
	hubClient, err := client.New(hub, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if err := checkAdmissionPolicies(ctx, hubClient); err != nil {
		return err
	}
	audiences, err := findAudiences(ctx, hubClient)
	if err != nil {
		return err
	}
	specs := map[string]*admission.ValidatingAdmissionPolicySpecApplyConfiguration{tokenPolicyName: tokenPolicy(audiences), summaryPolicyName: summaryPolicy()}
	for _, name := range []string{tokenPolicyName, summaryPolicyName} {
		policy := admission.ValidatingAdmissionPolicy(name).WithLabels(policyLabels()).WithSpec(specs[name].WithFailurePolicy(admissionv1.Fail))
		if err := hubClient.Apply(ctx, policy, client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
			if apierrors.IsForbidden(err) {
				err = fmt.Errorf("%w; the permissions of the hub are those of an earlier version: apply config/hub.yaml of this version, or upgrade the chart", err)
			}
			return fmt.Errorf("write ValidatingAdmissionPolicy %s: %w", name, err)
		}
		if err := hubClient.Apply(ctx, bindingOf(name), client.FieldOwner(kube.FieldManager), client.ForceOwnership); err != nil {
			return fmt.Errorf("write ValidatingAdmissionPolicyBinding %s: %w", name, err)
		}
	}
	return nil
}

// findAudiences returns the audiences of the hub's API server. Only a token shows them: it is for a ServiceAccount
// without any rights, and is not used.
func findAudiences(ctx context.Context, hub client.Client) ([]string, error) {
	if err := EnsureNamespace(ctx, hub, &corev1.Namespace{ObjectMeta: named("", kube.AgentNamespace)}); err != nil {
		return nil, err
	}
	account := &corev1.ServiceAccount{ObjectMeta: named(kube.AgentNamespace, audienceAccount), AutomountServiceAccountToken: ptr.To(false)}
	if err := hub.Create(ctx, account, client.FieldOwner(kube.FieldManager)); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("create ServiceAccount %s: %w", audienceAccount, err)
	}
	request := &authenticationv1.TokenRequest{}
	if err := hub.SubResource("token").Create(ctx, account, request); err != nil {
		return nil, fmt.Errorf("request a token for ServiceAccount %s: %w", audienceAccount, err)
	}
	return request.Spec.Audiences, nil
}

// isForAudiences returns the expression that is true if a token is for some of the audiences only. The API server has
// set its own audiences where the request had none.
func isForAudiences(audiences []string) string {
	quoted := make([]string, 0, len(audiences))
	for _, audience := range audiences {
		quoted = append(quoted, strconv.Quote(audience))
	}
	return fmt.Sprintf("!has(object.spec.audiences) || object.spec.audiences.all(audience, audience in [%s])", strings.Join(quoted, ", "))
}

func policyLabels() map[string]string { return map[string]string{"app.kubernetes.io/name": "towline"} }

func tokenPolicy(audiences []string) *admission.ValidatingAdmissionPolicySpecApplyConfiguration {
	seconds := int64(MaxTokenLife / time.Second)
	return admission.ValidatingAdmissionPolicySpec().
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
				WithReason(metav1.StatusReasonForbidden),
			admission.Validation().
				WithExpression(isForAudiences(audiences)).
				WithMessage("an agent may request only tokens for the API server for itself").
				WithReason(metav1.StatusReasonForbidden))
}

// summaryPolicy denies that a user who may not write ClusterSummaries in all namespaces creates one that belongs to a
// ClusterProfile, or changes its content. The content of a ClusterProfile is not confined to the namespace of its
// summaries: without the policy, a user who may write ClusterSummaries in one namespace could have the hub read the
// Secrets of others, and deploy to the hub with its rights.
func summaryPolicy() *admission.ValidatingAdmissionPolicySpecApplyConfiguration {
	const (
		// belongs is true for a summary that belongs to a ClusterProfile, or to something unknown, or has the label by which
		// the hub takes a summary over for a ClusterProfile.
		belongs = "%[1]s.metadata.?ownerReferences.orValue([]).exists(owner," +
			" owner.kind == 'ClusterProfile' || (owner.?controller.orValue(false) && owner.kind != 'Profile'))" +
			" || '" + configv1beta1.ClusterProfileNameLabel + "' in %[1]s.metadata.?labels.orValue({})"
		changes = "request.operation == 'CREATE' || object.spec != oldObject.spec || object.metadata.?labels != oldObject.metadata.?labels" +
			" || object.metadata.?ownerReferences != oldObject.metadata.?ownerReferences"
		isConfined = "!authorizer.group('config.projectsveltos.io').resource('clustersummaries').check('update').allowed()"
	)
	return admission.ValidatingAdmissionPolicySpec().
		WithMatchConstraints(admission.MatchResources().WithResourceRules(admission.NamedRuleWithOperations().
			WithAPIGroups(configv1beta1.GroupVersion.Group).WithAPIVersions(configv1beta1.GroupVersion.Version).
			WithOperations(admissionv1.Create, admissionv1.Update).WithResources("clustersummaries"))).
		WithMatchConditions(
			admission.MatchCondition().WithName("belongs-to-a-clusterprofile").WithExpression(
				fmt.Sprintf(belongs, "object")+" || (request.operation == 'UPDATE' && ("+fmt.Sprintf(belongs, "oldObject")+"))"),
			admission.MatchCondition().WithName("changes-the-content").WithExpression(changes),
			admission.MatchCondition().WithName("by-a-user-of-some-namespaces").WithExpression(isConfined)).
		WithValidations(admission.Validation().
			WithExpression("false").
			WithMessage("only users who may update ClusterSummaries in all namespaces may write one that belongs to a ClusterProfile").
			WithReason(metav1.StatusReasonForbidden))
}

func bindingOf(policy string) *admission.ValidatingAdmissionPolicyBindingApplyConfiguration {
	return admission.ValidatingAdmissionPolicyBinding(policy).
		WithLabels(policyLabels()).
		WithSpec(admission.ValidatingAdmissionPolicyBindingSpec().WithPolicyName(policy).WithValidationActions(admissionv1.Deny))
}
