package hub

import (
	"context"
	"fmt"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// summaryPolicyName is the name of the policy for ClusterSummaries and of its binding.
const summaryPolicyName = "towline-cluster-summaries"

// EnsureAdmissionPolicies creates or updates the ValidatingAdmissionPolicies of the hub and their bindings: the policy
// of join.EnsureTokenPolicy, and summaryPolicy. It returns kube.ErrNoAdmissionPolicies for a hub without
// ValidatingAdmissionPolicies.
func EnsureAdmissionPolicies(ctx context.Context, hub *rest.Config) error {
	hubClient, err := client.New(hub, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if _, err := join.EnsureTokenPolicy(ctx, hubClient); err != nil {
		return err
	}
	_, err = kube.EnsureAdmissionPolicy(ctx, hubClient, summaryPolicyName, kube.FixedSpec(summaryPolicy()))
	return err
}

// summaryPolicy protects the ClusterSummaries of ClusterProfiles: only users who may update ClusterSummaries in all
// namespaces may create them or change their content. Without the policy, a user who may write ClusterSummaries in one
// namespace could make the hub read Secrets of other namespaces, and deploy to the hub with its rights, since the
// content of a ClusterProfile is not confined to a namespace.
//
// A summary of a Profile is not protected. Each other owner counts as a ClusterProfile, also an owner that does not
// exist: the garbage collector keeps a summary whose owner has an unknown kind.
func summaryPolicy() admissionv1.ValidatingAdmissionPolicySpec {
	const (
		// isProtected is true for a summary that has an owner other than a Profile, or the label by which the hub adopts a
		// summary for a ClusterProfile.
		isProtected = "%[1]s.metadata.?ownerReferences.orValue([]).exists(owner," +
			" owner.kind != '" + configv1beta1.ProfileKind + "' || owner.apiVersion != 'config.projectsveltos.io/v1beta1')" +
			" || '" + configv1beta1.ClusterProfileNameLabel + "' in %[1]s.metadata.?labels.orValue({})"
		isContentChange = "request.operation == 'CREATE' || object.spec != oldObject.spec || object.metadata.?labels != oldObject.metadata.?labels" +
			" || object.metadata.?ownerReferences != oldObject.metadata.?ownerReferences"
		isConfinedUser = "!authorizer.group('config.projectsveltos.io').resource('clustersummaries').check('update').allowed()"
	)
	return kube.AdmissionPolicySpec(
		[]admissionv1.RuleWithOperations{kube.AdmissionRule(configv1beta1.GroupVersion, "clustersummaries", admissionv1.Create, admissionv1.Update)},
		[]admissionv1.MatchCondition{
			{
				Name:       "belongs-to-a-clusterprofile",
				Expression: fmt.Sprintf(isProtected, "object") + " || (request.operation == 'UPDATE' && (" + fmt.Sprintf(isProtected, "oldObject") + "))",
			},
			{Name: "changes-the-content", Expression: isContentChange},
			{Name: "by-a-user-of-some-namespaces", Expression: isConfinedUser},
		},
		admissionv1.Validation{
			Expression: "false",
			Message: "only users who may update ClusterSummaries in all namespaces may write one that belongs to a ClusterProfile," +
				" or has an owner that is not a Profile",
		})
}
