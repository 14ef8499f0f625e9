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
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

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
	if _, err := EnsureAdmissionPolicy(ctx, hubClient, tokenPolicyName, tokenPolicy(audiences)); err != nil {
		return err
	}
	_, err = EnsureAdmissionPolicy(ctx, hubClient, summaryPolicyName, summaryPolicy())
	return err
}

// EnsureAdmissionPolicy creates or restores a ValidatingAdmissionPolicy and the binding with the same name, and returns
// whether it has changed one of them. spec is from AdmissionPolicySpec. It returns ErrNoAdmissionPolicies for a hub
// without ValidatingAdmissionPolicies. hub must read from the API server.
func EnsureAdmissionPolicy(ctx context.Context, hub client.Client, name string, spec admissionv1.ValidatingAdmissionPolicySpec) (changed bool, err error) {
	hub, labels := client.WithFieldOwner(hub, kube.FieldManager), map[string]string{"app.kubernetes.io/name": "towline"}
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: named("", name)}
	policyResult, err := controllerutil.CreateOrUpdate(ctx, hub, policy, func() error {
		policy.Labels, policy.Spec = labels, spec
		return nil
	})
	switch {
	case meta.IsNoMatchError(err):
		return false, fmt.Errorf("%w: %w", ErrNoAdmissionPolicies, err)
	case apierrors.IsForbidden(err):
		err = fmt.Errorf("%w; the permissions of the hub are those of an earlier version: apply config/hub.yaml of this version, or upgrade the chart", err)
		fallthrough
	case err != nil:
		return false, fmt.Errorf("write ValidatingAdmissionPolicy %s: %w", name, err)
	}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: named("", name)}
	bindingResult, err := controllerutil.CreateOrUpdate(ctx, hub, binding, func() error {
		binding.Labels = labels
		binding.Spec = admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("write ValidatingAdmissionPolicyBinding %s: %w", name, err)
	}
	return policyResult != controllerutil.OperationResultNone || bindingResult != controllerutil.OperationResultNone, nil
}

// AdmissionPolicySpec returns a policy for requests to the resources for which all conditions are true. It denies those
// for which a validation is false. It has the defaults of the API server, so that it can be compared with a live one.
func AdmissionPolicySpec(resources []admissionv1.RuleWithOperations, conditions []admissionv1.MatchCondition, validations ...admissionv1.Validation) admissionv1.ValidatingAdmissionPolicySpec {
	constraints := &admissionv1.MatchResources{
		NamespaceSelector: &metav1.LabelSelector{}, ObjectSelector: &metav1.LabelSelector{}, MatchPolicy: ptr.To(admissionv1.Equivalent),
	}
	for _, rule := range resources {
		rule.Scope = ptr.To(admissionv1.AllScopes)
		constraints.ResourceRules = append(constraints.ResourceRules, admissionv1.NamedRuleWithOperations{RuleWithOperations: rule})
	}
	for i := range validations {
		validations[i].Reason = ptr.To(metav1.StatusReasonForbidden)
	}
	return admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: ptr.To(admissionv1.Fail), MatchConstraints: constraints, MatchConditions: conditions, Validations: validations,
	}
}

// AdmissionRule selects requests of one kind to a resource.
func AdmissionRule(gv schema.GroupVersion, resource string, operations ...admissionv1.OperationType) admissionv1.RuleWithOperations {
	return admissionv1.RuleWithOperations{
		Operations: operations,
		Rule:       admissionv1.Rule{APIGroups: []string{gv.Group}, APIVersions: []string{gv.Version}, Resources: []string{resource}},
	}
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

// isForAudiences returns the expression that is true if all requested audiences of a token are in audiences. The API
// server has set its own audiences where the request had none.
func isForAudiences(audiences []string) string {
	quoted := make([]string, 0, len(audiences))
	for _, audience := range audiences {
		quoted = append(quoted, strconv.Quote(audience))
	}
	return fmt.Sprintf("!has(object.spec.audiences) || object.spec.audiences.all(audience, audience in [%s])", strings.Join(quoted, ", "))
}

func tokenPolicy(audiences []string) admissionv1.ValidatingAdmissionPolicySpec {
	seconds := int64(MaxTokenLife / time.Second)
	return AdmissionPolicySpec(
		[]admissionv1.RuleWithOperations{AdmissionRule(corev1.SchemeGroupVersion, "serviceaccounts/token", admissionv1.Create)},
		[]admissionv1.MatchCondition{{Name: "for-itself", Expression: isOwnToken}, {Name: "is-an-agent", Expression: isAgent}},
		admissionv1.Validation{
			Expression: fmt.Sprintf("!has(object.spec.expirationSeconds) || object.spec.expirationSeconds <= %d", seconds),
			Message:    fmt.Sprintf("an agent may request a token of at most %d seconds for itself", seconds),
		},
		admissionv1.Validation{
			Expression: isAnchored,
			Message:    "an agent may request only tokens that are bound to Secret <cluster>" + anchorSuffix + " for itself",
		},
		admissionv1.Validation{
			Expression: isForAudiences(audiences), Message: "an agent may request only tokens for the API server for itself",
		})
}

// summaryPolicy denies that a user who may not write ClusterSummaries in all namespaces creates one that belongs to a
// ClusterProfile, or changes its content. The content of a ClusterProfile is not confined to the namespace of its
// summaries: without the policy, a user who may write ClusterSummaries in one namespace could have the hub read the
// Secrets of others, and deploy to the hub with its rights.
func summaryPolicy() admissionv1.ValidatingAdmissionPolicySpec {
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
	return AdmissionPolicySpec(
		[]admissionv1.RuleWithOperations{AdmissionRule(configv1beta1.GroupVersion, "clustersummaries", admissionv1.Create, admissionv1.Update)},
		[]admissionv1.MatchCondition{
			{
				Name:       "belongs-to-a-clusterprofile",
				Expression: fmt.Sprintf(belongs, "object") + " || (request.operation == 'UPDATE' && (" + fmt.Sprintf(belongs, "oldObject") + "))",
			},
			{Name: "changes-the-content", Expression: changes},
			{Name: "by-a-user-of-some-namespaces", Expression: isConfined},
		},
		admissionv1.Validation{
			Expression: "false",
			Message:    "only users who may update ClusterSummaries in all namespaces may write one that belongs to a ClusterProfile",
		})
}
