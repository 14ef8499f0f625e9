package summaries

import (
	"cmp"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/phase"
)

// The labels of a profile can name a ServiceAccount. Requests for its content then impersonate it: on a member the
// ServiceAccount of the member with this name, and on the hub the ServiceAccount of the hub (deploymentType Local).

// localAccount returns the "namespace/name" of the ServiceAccount as which the content of a profile is applied to the
// cluster of the hub, "" for the identity of the hub. A ClusterProfile can deploy with the permissions of the hub. A
// Profile must name a ServiceAccount of its namespace, since its author may have permissions in this namespace only.
func localAccount(owner bundle.Owner, summary *configv1beta1.ClusterSummary) (string, error) {
	name, namespace := summary.Labels[libv1beta1.ServiceAccountNameLabel], summary.Labels[libv1beta1.ServiceAccountNamespaceLabel]
	if owner.Kind == configv1beta1.ProfileKind {
		if name == "" {
			return "", phase.TerminalErrorf("a Profile deploys to the hub as a ServiceAccount of its namespace: set label %s of the Profile to the name of one that may write the objects",
				libv1beta1.ServiceAccountNameLabel)
		}
		if namespace != "" && namespace != summary.Namespace {
			return "", phase.TerminalErrorf("a Profile deploys to the hub as a ServiceAccount of its own namespace %s, and label %s names %s",
				summary.Namespace, libv1beta1.ServiceAccountNamespaceLabel, namespace)
		}
	}
	return memberAccount(owner, summary)
}

// memberAccount returns the "namespace/name" of the ServiceAccount of the member as which the content of a profile is
// applied, "" for the identity of the hub or the agent. The namespace defaults to the namespace of a Profile.
func memberAccount(owner bundle.Owner, summary *configv1beta1.ClusterSummary) (string, error) {
	name, namespace := summary.Labels[libv1beta1.ServiceAccountNameLabel], summary.Labels[libv1beta1.ServiceAccountNamespaceLabel]
	if name == "" && namespace == "" {
		return "", nil
	}
	if owner.Kind == configv1beta1.ProfileKind {
		namespace = cmp.Or(namespace, summary.Namespace)
	}
	if name == "" || namespace == "" {
		return "", phase.TerminalErrorf("labels %s and %s must be set together", libv1beta1.ServiceAccountNameLabel, libv1beta1.ServiceAccountNamespaceLabel)
	}
	return namespace + "/" + name, nil
}

// account returns the ServiceAccount as which a bundle is applied, "" for the identity of the hub or the agent.
func (r ComposeRequest) account() (string, error) {
	if r.IsLocal {
		return localAccount(r.Owner, r.Summary)
	}
	return memberAccount(r.Owner, r.Summary)
}

// withdrawalAccount returns the ServiceAccount as which the bundle of a feature is withdrawn, "" for the ServiceAccount
// in the record of the bundle. The labels name the ServiceAccount only if there is no record: they may have changed
// since the bundle was applied, and deletion hooks must not run as another ServiceAccount.
func (s *state) withdrawalAccount(feature libv1beta1.FeatureID) string {
	if _, isRecorded := s.deployed[feature]; isRecorded {
		return ""
	}
	owner, err := bundleOwnerOf(s.summary)
	if err != nil {
		return ""
	}
	account, err := ComposeRequest{Summary: s.summary, Owner: owner, IsLocal: s.member.Mode == fleet.Local}.account()
	if err != nil {
		return ""
	}
	return account
}
