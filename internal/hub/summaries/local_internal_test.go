package summaries

import (
	"errors"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

func TestLocalAccount(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		kind, name, namespace string
		want                  string
		isRefused             bool
	}{
		"ClusterProfile":                            {configv1beta1.ClusterProfileKind, "", "", "", false},
		"ClusterProfile with both labels":           {configv1beta1.ClusterProfileKind, "deployer", "other", "other/deployer", false},
		"ClusterProfile without a namespace":        {configv1beta1.ClusterProfileKind, "deployer", "", "", true},
		"ClusterProfile without a name":             {configv1beta1.ClusterProfileKind, "", "other", "", true},
		"Profile":                                   {configv1beta1.ProfileKind, "", "", "", true},
		"Profile with a name":                       {configv1beta1.ProfileKind, "deployer", "", "team/deployer", false},
		"Profile with both labels":                  {configv1beta1.ProfileKind, "deployer", "team", "team/deployer", false},
		"Profile with an account of others":         {configv1beta1.ProfileKind, "deployer", "other", "", true},
		"Profile with the namespace of others only": {configv1beta1.ProfileKind, "", "other", "", true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := localAccount(bundle.Owner{Kind: tc.kind}, labelled(tc.name, tc.namespace))
			if got != tc.want || (err != nil) != tc.isRefused {
				t.Errorf("localAccount() = %q, %v; want %q, refused %v", got, err, tc.want, tc.isRefused)
			}
		})
	}
}

// labelled returns a summary in namespace team whose labels name a ServiceAccount.
func labelled(account, namespace string) *configv1beta1.ClusterSummary {
	return &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Labels: map[string]string{
		libv1beta1.ServiceAccountNameLabel: account, libv1beta1.ServiceAccountNamespaceLabel: namespace,
	}}}
}

// TestWithdrawalIsOfTheRecordedAccount withdraws a bundle after the labels have changed.
func TestWithdrawalIsOfTheRecordedAccount(t *testing.T) {
	t.Parallel()
	const feature = libv1beta1.FeatureHelm
	for name, test := range map[string]struct {
		deployed map[libv1beta1.FeatureID]bundle.Deployed
		want     string
	}{
		"recorded":          {map[libv1beta1.FeatureID]bundle.Deployed{feature: {}}, ""},
		"a record was lost": {map[libv1beta1.FeatureID]bundle.Deployed{libv1beta1.FeatureResources: {}}, "kube-system/admin"},
	} {
		summary := labelled("admin", "kube-system")
		summary.OwnerReferences = []metav1.OwnerReference{
			*metav1.NewControllerRef(&configv1beta1.Profile{}, configv1beta1.GroupVersion.WithKind(configv1beta1.ProfileKind)),
		}
		s := newState(summary, nil, fleet.Member{})
		s.deployed = test.deployed
		if got := s.withdrawalAccount(feature); got != test.want {
			t.Errorf("%s: the withdrawal is sent as %q, want %q", name, got, test.want)
		}
	}
}

func TestMemberAccount(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		kind, name, namespace string
		want                  string
		isRefused             bool
	}{
		"ClusterProfile":                     {configv1beta1.ClusterProfileKind, "", "", "", false},
		"ClusterProfile with both labels":    {configv1beta1.ClusterProfileKind, "deployer", "other", "other/deployer", false},
		"ClusterProfile without a namespace": {configv1beta1.ClusterProfileKind, "deployer", "", "", true},
		"Profile":                            {configv1beta1.ProfileKind, "", "", "", false},
		"Profile with a name":                {configv1beta1.ProfileKind, "deployer", "", "team/deployer", false},
		"Profile with both labels":           {configv1beta1.ProfileKind, "deployer", "other", "other/deployer", false},
		"Profile with a namespace only":      {configv1beta1.ProfileKind, "", "other", "", true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := memberAccount(bundle.Owner{Kind: tc.kind}, labelled(tc.name, tc.namespace))
			if got != tc.want || (err != nil) != tc.isRefused {
				t.Errorf("memberAccount() = %q, %v; want %q, refused %v", got, err, tc.want, tc.isRefused)
			}
		})
	}
}

func TestCheckLocal(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		apiVersion, kind, namespace, name string
		isRefused                         bool
	}{
		"ConfigMap":                  {"v1", "ConfigMap", "team", "towline-hub", false},
		"in the hub's namespace":     {"v1", "ConfigMap", "projectsveltos", "any", true},
		"the hub's namespace":        {"v1", "Namespace", "", "projectsveltos", true},
		"another namespace":          {"v1", "Namespace", "", "team", false},
		"the hub's ClusterRole":      {"rbac.authorization.k8s.io/v1", "ClusterRole", "", "towline-hub", true},
		"another ClusterRole":        {"rbac.authorization.k8s.io/v1", "ClusterRole", "", "view", false},
		"the hub's policy":           {"admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", "", "towline-token-life", true},
		"a definition of Towline":    {"apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "profiles.config.projectsveltos.io", true},
		"another definition":         {"apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "widgets.example.com", false},
		"a summary":                  {"config.projectsveltos.io/v1beta1", "ClusterSummary", "team", "any", true},
		"a group":                    {"lib.projectsveltos.io/v1beta1", "ConfigurationGroup", "team", "any", true},
		"a cluster":                  {"lib.projectsveltos.io/v1beta1", "SveltosCluster", "team", "any", false},
		"a kind with the same name":  {"example.com/v1", "ClusterSummary", "team", "any", false},
		"a group with the same tail": {"notprojectsveltos.io/v1", "ClusterSummary", "team", "any", false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			obj := &unstructured.Unstructured{}
			obj.SetAPIVersion(tc.apiVersion)
			obj.SetKind(tc.kind)
			obj.SetNamespace(tc.namespace)
			obj.SetName(tc.name)
			if err := checkLocal([]bundle.Item{{Objects: []*unstructured.Unstructured{obj}}}); (err != nil) != tc.isRefused {
				t.Errorf("checkLocal() = %v, want refused %v", err, tc.isRefused)
			}
		})
	}
}

func TestStartedWithdrawalFromTheHubKeepsItsOptionsWithoutACluster(t *testing.T) {
	t.Parallel()
	const feature = libv1beta1.FeatureResources
	tests := map[string]struct {
		cluster  client.Object
		deployed bundle.Deployed
		want     bool
	}{
		"begun with --keep-addons":                    {nil, bundle.Deployed{Removing: true, Orphan: true}, true},
		"begun as a deletion":                         {nil, bundle.Deployed{Removing: true}, false},
		"not begun":                                   {nil, bundle.Deployed{Orphan: true}, false},
		"the cluster exists, which now has no option": {&libv1beta1.SveltosCluster{}, bundle.Deployed{Removing: true, Orphan: true}, false},
	}
	for name, tc := range tests {
		s := &state{cluster: tc.cluster, deployed: map[libv1beta1.FeatureID]bundle.Deployed{feature: tc.deployed}}
		if got := s.isOrphaned(feature); got != tc.want {
			t.Errorf("%s: isOrphaned() = %v, want %v", name, got, tc.want)
		}
	}
}

// TestLocalContentStaysUntilOtherContentIsDelivered replaces policyRefs by kustomizationRefs, whose ConfigMap does not
// exist at first.
func TestLocalContentStaysUntilOtherContentIsDelivered(t *testing.T) {
	t.Parallel()
	r := newRestarts(t)
	r.isLocal, r.deployed = true, map[bundle.ID]bundle.Deployed{}
	change := func(change func(spec *configv1beta1.ProfileSpec)) {
		s := r.summary()
		s.Generation++
		change(&s.Spec.ClusterProfileSpec)
		r.must(r.hub.Update(t.Context(), s))
	}
	want := func(step string, want ...libv1beta1.FeatureID) {
		t.Helper()
		r.reconcile()
		var got []libv1beta1.FeatureID
		for id := range r.deployed {
			got = append(got, libv1beta1.FeatureID(id.Feature))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: the hub has %v, want %v", step, got, want)
		}
	}
	change(func(spec *configv1beta1.ProfileSpec) {
		for i := range spec.PolicyRefs {
			spec.PolicyRefs[i].DeploymentType = libv1beta1.DeploymentTypeLocal
		}
	})
	want("at first", libv1beta1.FeatureResources)
	change(func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs = nil
		spec.KustomizationRefs = []configv1beta1.KustomizationRef{{Kind: libv1beta1.SourceConfigMap, Name: "app", DeploymentType: libv1beta1.DeploymentTypeLocal}}
	})
	want("without the source", libv1beta1.FeatureResources)
	r.must(r.hub.Create(t.Context(), kustomization("app", "1")))
	r.refusal = errors.New("no answer")
	want("the delivery fails", libv1beta1.FeatureResources)
	r.refusal = nil
	want("delivered", libv1beta1.FeatureKustomize)
}
