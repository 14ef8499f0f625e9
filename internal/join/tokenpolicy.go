package join

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// MaxTokenLife is the maximum life of a token that an agent requests. The hub's admission policy enforces it.
const MaxTokenLife = 24 * time.Hour

const (
	// tokenPolicyName is the name of the policy and of its binding.
	tokenPolicyName = "towline-token-life"
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

// EnsureTokenPolicy creates or updates the ValidatingAdmissionPolicy for the tokens of agents, and its binding. It
// denies an agent's request of a token for itself if the life is longer than MaxTokenLife, if the token is not bound to
// the agent's anchor Secret, or if it is for another audience than the API server. RBAC cannot restrict this: the
// holder of a copied token could request a token that is valid for years, that stays valid after a revocation, or that
// other systems accept which trust the issuer of the hub, such as a cloud. The API server enforces a new policy after
// some seconds. It returns kube.ErrNoAdmissionPolicies for a hub without ValidatingAdmissionPolicies.
func EnsureTokenPolicy(ctx context.Context, hub client.Client) error {
	if err := kube.CheckAdmissionPolicies(ctx, hub); err != nil {
		return err
	}
	audiences, err := findAudiences(ctx, hub)
	if err != nil {
		return err
	}
	_, err = kube.EnsureAdmissionPolicy(ctx, hub, tokenPolicyName, tokenPolicy(audiences))
	return err
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
	return kube.AdmissionPolicySpec(
		[]admissionv1.RuleWithOperations{kube.AdmissionRule(corev1.SchemeGroupVersion, "serviceaccounts/token", admissionv1.Create)},
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
