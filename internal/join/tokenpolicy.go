package join

import (
	"context"
	"encoding/json"
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
	// isAgent is true for a user who may patch the status of the SveltosCluster with the account's name, but not the
	// status of other SveltosClusters.
	isAgent = mayReport + ".name(request.name).check('patch').allowed() && !" + mayReport + ".check('patch').allowed()"
	// isAnchored is true for the request of a token that is bound to the anchor Secret.
	isAnchored = "has(object.spec.boundObjectRef) && has(object.spec.boundObjectRef.kind) && object.spec.boundObjectRef.kind == 'Secret'" +
		" && has(object.spec.boundObjectRef.name) && object.spec.boundObjectRef.name == request.name + '" + anchorSuffix + "'"
	// isForAudiences is a format. With a list of quoted audiences, it is true if all audiences of the token are in the
	// list. The API server sets its own audiences before admission if the request has none.
	isForAudiences = "!has(object.spec.audiences) || object.spec.audiences.all(audience, audience in [%s])"
	// mayReport is the authorizer check for the status of SveltosClusters in the account's namespace.
	mayReport = "authorizer.group('lib.projectsveltos.io').resource('sveltosclusters').subresource('status').namespace(request.namespace)"
)

// EnsureTokenPolicy creates or updates the ValidatingAdmissionPolicy for the tokens of agents, and its binding. The
// policy denies an agent's request for a token of its own account if the life is longer than MaxTokenLife, if the token
// is not bound to the anchor Secret, or if it is for another audience than the API server. RBAC cannot limit this: with
// a copied token, an attacker could request a token that is valid for years, that stays valid after a revocation, or
// that another system, such as a cloud, accepts because it trusts the issuer of the hub. isNew is true if the API
// server may not enforce the policy yet. EnsureTokenPolicy returns kube.ErrNoAdmissionPolicies for a hub without
// ValidatingAdmissionPolicies.
func EnsureTokenPolicy(ctx context.Context, hub client.Client) (isNew bool, err error) {
	if err := kube.CheckAdmissionPolicies(ctx, hub); err != nil {
		return false, err
	}
	audiences, err := findAudiences(ctx, hub)
	if err != nil {
		return false, err
	}
	return kube.EnsureAdmissionPolicy(ctx, hub, tokenPolicyName, kube.FixedSpec(tokenPolicy(audiences)))
}

// enforceTokenPolicy is EnsureTokenPolicy before an agent gets an identity: the hub may not have created the policy
// yet, or a user may have deleted it. It waits until the API server enforces a new policy. It keeps the audiences of an
// existing policy, which saves a request per registration.
func enforceTokenPolicy(ctx context.Context, hub client.Client) error {
	if err := kube.CheckAdmissionPolicies(ctx, hub); err != nil {
		return err
	}
	isNew, err := kube.EnsureAdmissionPolicy(ctx, hub, tokenPolicyName, func(live kube.PolicySpec) (kube.PolicySpec, error) {
		if audiences := audiencesOf(live); len(audiences) > 0 {
			return tokenPolicy(audiences), nil
		}
		audiences, err := findAudiences(ctx, hub)
		return tokenPolicy(audiences), err
	})
	if err != nil || !isNew {
		return err
	}
	return kube.AwaitPolicy(ctx)
}

// findAudiences returns the audiences of the hub's API server. Only the response to a token request has them, so it
// requests a token for a ServiceAccount without permissions, which it creates if needed. The token is not used.
func findAudiences(ctx context.Context, hub client.Client) ([]string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: objectMeta(kube.AgentNamespace, audienceAccount), AutomountServiceAccountToken: ptr.To(false)}
	request := &authenticationv1.TokenRequest{}
	err := hub.SubResource("token").Create(ctx, account, request)
	if apierrors.IsNotFound(err) {
		if err := EnsureNamespace(ctx, hub, &corev1.Namespace{ObjectMeta: objectMeta("", kube.AgentNamespace)}); err != nil {
			return nil, err
		}
		if err := hub.Create(ctx, account, client.FieldOwner(kube.FieldManager)); client.IgnoreAlreadyExists(err) != nil {
			return nil, fmt.Errorf("create ServiceAccount %s: %w", audienceAccount, err)
		}
		err = hub.SubResource("token").Create(ctx, account, request)
	}
	if err != nil {
		return nil, fmt.Errorf("request a token for ServiceAccount %s: %w", audienceAccount, err)
	}
	return request.Spec.Audiences, nil
}

// audiencesOf returns the audiences in a policy that tokenPolicy created, or nil.
func audiencesOf(live kube.PolicySpec) (audiences []string) {
	prefix, suffix, _ := strings.Cut(isForAudiences, "%s")
	for _, validation := range live.Validations {
		list, isFound := strings.CutPrefix(validation.Expression, prefix) // quoted strings, as in a list of JSON
		if isFound && json.Unmarshal([]byte("["+strings.TrimSuffix(list, suffix)+"]"), &audiences) == nil {
			return audiences
		}
	}
	return nil
}

func tokenPolicy(audiences []string) kube.PolicySpec {
	quoted := make([]string, 0, len(audiences))
	for _, audience := range audiences {
		quoted = append(quoted, strconv.Quote(audience))
	}
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
			Expression: fmt.Sprintf(isForAudiences, strings.Join(quoted, ", ")), Message: "an agent may request only tokens for the API server for itself",
		})
}
