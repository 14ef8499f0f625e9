package match_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/match"
)

func TestMembers(t *testing.T) {
	t.Parallel()
	prod := map[string]string{"env": "prod"}
	members := []fleet.Member{
		{Namespace: "us", Name: "b", Labels: prod, Ready: true},
		{Namespace: "eu", Name: "a", Labels: prod, Ready: true},
		{Namespace: "eu", Name: "new", Labels: prod},
		{Namespace: "eu", Name: "gone", Labels: prod, Ready: true, Deleting: true},
		{Namespace: "eu", Name: "test", Labels: map[string]string{"env": "test"}, Ready: true},
		{Namespace: "eu", Name: "down", Labels: prod, Ready: true, Down: true},
	}
	for i := range members {
		members[i].Type = fleet.TypeSveltos
	}
	members = append(members,
		fleet.Member{Type: fleet.TypeKarmada, Namespace: "karmada-es-a", Name: "a", Labels: map[string]string{"env": "both"}, Ready: true},
		fleet.Member{Type: fleet.TypeKarmada, Namespace: "karmada-es-new", Name: "new"},
		fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "both", Labels: map[string]string{"env": "both"}, Ready: true},
	)
	both := metav1.LabelSelector{MatchLabels: map[string]string{"env": "both"}}
	selector := metav1.LabelSelector{MatchLabels: prod}
	tests := map[string]struct {
		spec       configv1beta1.ProfileSpec
		namespace  string
		hasSummary map[fleet.ID]bool
		want       []string
		wantErr    string
	}{
		"an empty selector matches nothing": {},
		"a selector matches ready members":  {spec: configv1beta1.ProfileSpec{ClusterSelector: selector}, want: []string{"eu/a", "eu/down", "us/b"}},
		"a Profile sees its namespace":      {spec: configv1beta1.ProfileSpec{ClusterSelector: selector}, namespace: "us", want: []string{"us/b"}},
		"a selector keeps matching a member that has a summary": {
			spec: configv1beta1.ProfileSpec{ClusterSelector: selector},
			hasSummary: map[fleet.ID]bool{
				{Type: fleet.TypeSveltos, Namespace: "eu", Name: "new"}: true, {Type: fleet.TypeSveltos, Namespace: "eu", Name: "gone"}: true,
				{Type: fleet.TypeSveltos, Namespace: "eu", Name: "test"}: true, {Type: fleet.TypeKarmada, Namespace: "karmada-es-new", Name: "new"}: true,
			},
			want: []string{"eu/a", "eu/down", "eu/new", "us/b"},
		},
		"a summary on a member of the other kind is none": {
			spec:       configv1beta1.ProfileSpec{ClusterSelector: selector},
			namespace:  "eu",
			hasSummary: map[fleet.ID]bool{{Type: fleet.TypeKarmada, Namespace: "eu", Name: "new"}: true},
			want:       []string{"eu/a", "eu/down"},
		},
		"a ref needs no readiness": {
			spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{Kind: "SveltosCluster", Namespace: "eu", Name: "new"}, {Namespace: "eu", Name: "gone"}, {Namespace: "eu", Name: "none"}}},
			want: []string{"eu/new"},
		},
		"a ref of a Profile defaults to its namespace": {
			spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{Name: "new"}, {Namespace: "us", Name: "b"}}}, namespace: "eu",
			want: []string{"eu/new"},
		},
		"both ways match once": {
			spec: configv1beta1.ProfileSpec{ClusterSelector: selector, ClusterRefs: []corev1.ObjectReference{{Namespace: "eu", Name: "a"}, {Namespace: "eu", Name: "test"}}},
			want: []string{"eu/a", "eu/down", "eu/test", "us/b"},
		},
		"a ref to another kind is no member": {spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{Kind: "Cluster", Namespace: "eu", Name: "a"}}}},
		"a ref to a Cluster of Cluster API is no member": {
			spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{APIVersion: "cluster.x-k8s.io/v1beta1", Kind: "Cluster", Namespace: "eu", Name: "a"}}},
		},
		"a ref to a Cluster has no namespace": {
			spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{APIVersion: "cluster.karmada.io/v1alpha1", Kind: "Cluster", Name: "new"}}},
			want: []string{"karmada-es-new/new"},
		},
		"a SveltosCluster is of no other group": {
			spec: configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{APIVersion: "cluster.karmada.io/v1alpha1", Kind: "SveltosCluster", Namespace: "eu", Name: "a"}}},
		},
		"a selector matches both kinds":           {spec: configv1beta1.ProfileSpec{ClusterSelector: both}, want: []string{"eu/both", "karmada-es-a/a"}},
		"a Profile sees the Cluster of its space": {spec: configv1beta1.ProfileSpec{ClusterSelector: both}, namespace: "karmada-es-a", want: []string{"karmada-es-a/a"}},
		"a Profile sees no other Cluster": {
			spec:      configv1beta1.ProfileSpec{ClusterRefs: []corev1.ObjectReference{{APIVersion: "cluster.karmada.io/v1alpha1", Kind: "Cluster", Name: "new"}}},
			namespace: "eu",
		},
		"a broken selector is an error": {
			spec:    configv1beta1.ProfileSpec{ClusterSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "env", Operator: "Near"}}}},
			wantErr: "spec.clusterSelector",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			selection, err := match.NewSelection(&tc.spec, tc.namespace)
			if tc.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
					t.Errorf("NewSelection() error = %v, want %q", err, tc.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var keys []string
			for _, m := range selection.Members(members, tc.hasSummary) {
				keys = append(keys, m.Key())
			}
			if diff := cmp.Diff(tc.want, keys); diff != "" {
				t.Errorf("Members() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefs(t *testing.T) {
	t.Parallel()
	got := match.Refs([]fleet.Member{
		{Type: fleet.TypeSveltos, Namespace: "eu", Name: "a"}, {Type: fleet.TypeKarmada, Namespace: "karmada-es-a", Name: "a"},
	})
	want := []corev1.ObjectReference{
		{APIVersion: "lib.projectsveltos.io/v1beta1", Kind: "SveltosCluster", Namespace: "eu", Name: "a"},
		{APIVersion: "cluster.karmada.io/v1alpha1", Kind: "Cluster", Name: "a"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Refs() (-want +got):\n%s", diff)
	}
	got = append(got, []corev1.ObjectReference{
		{Name: "a"}, {Kind: "Cluster", Name: "a"}, {Kind: "Cluster", APIVersion: "cluster.x-k8s.io/v1beta1", Name: "a"}, {Kind: "SveltosCluster", Name: "a"}, {Kind: "Other", Name: "a"},
	}...)
	if diff := cmp.Diff([]string{"spec.clusterRefs[3].kind", "spec.clusterRefs[4].kind", "spec.clusterRefs[6].kind"}, match.UnsupportedRefs(configv1beta1.ProfileSpec{ClusterRefs: got})); diff != "" {
		t.Errorf("UnsupportedRefs() (-want +got):\n%s", diff)
	}
}

func TestSummaryNames(t *testing.T) {
	t.Parallel()
	member := func(name string) fleet.Member {
		return fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: name}
	}
	long := strings.Repeat("x", 250)
	tests := map[string]struct {
		kind, profile, cluster, want string
	}{
		"ClusterProfile": {"ClusterProfile", "deploy-kyverno", "cluster02", "deploy-kyverno-sveltos-cluster02"},
		"Profile":        {"Profile", "deploy-kyverno", "cluster02", "p--deploy-kyverno-sveltos-cluster02"},
	}
	for name, tc := range tests {
		if got := match.SummaryName(tc.kind, tc.profile, member(tc.cluster)); got != tc.want {
			t.Errorf("%s: SummaryName() = %q, want %q", name, got, tc.want)
		}
	}
	if a, b := match.SummaryName("ClusterProfile", "a-sveltos-b", member("c")), match.SummaryName("ClusterProfile", "a", member("b-sveltos-c")); a != b {
		t.Errorf("SummaryName() = %q and %q: the rule gives both the same", a, b)
	}
	if a, b := match.DistinctSummaryName("ClusterProfile", "a-sveltos-b", member("c")), match.DistinctSummaryName("ClusterProfile", "a", member("b-sveltos-c")); a == b {
		t.Errorf("DistinctSummaryName() = %q for both", a)
	}
	for _, got := range []string{match.SummaryName("Profile", long, member(long)), match.DistinctSummaryName("Profile", long, member(long))} {
		if len(got) > 253 {
			t.Errorf("name of %d bytes: %s", len(got), got)
		}
	}
	if got, want := match.SummaryName("ClusterProfile", "p", fleet.Member{Type: fleet.TypeKarmada, Namespace: "karmada-es-c", Name: "c"}), "p-karmada-c"; got != want {
		t.Errorf("SummaryName() of a Cluster = %q, want %q", got, want)
	}
	if a, b := match.LabelValue(long), match.LabelValue(long+"y"); len(a) > 63 || a == b || match.LabelValue("short") != "short" {
		t.Errorf("LabelValue() = %q and %q", a, b)
	}
}

// TestShortenedNamesAreValid cuts names at each of their characters: a name must not have ".-" in it.
func TestShortenedNamesAreValid(t *testing.T) {
	t.Parallel()
	for length := 220; length <= 253; length++ {
		profile := strings.Repeat("x", length-1) + ".y"
		m := fleet.Member{Type: fleet.TypeSveltos, Namespace: "eu", Name: "c-" + strings.Repeat("z", 40)}
		for _, name := range []string{match.SummaryName("ClusterProfile", profile, m), match.DistinctSummaryName("ClusterProfile", profile, m)} {
			if problems := validation.IsDNS1123Subdomain(name); len(problems) > 0 {
				t.Errorf("%s: %v", name, problems)
			}
		}
	}
}

func TestFindConflicts(t *testing.T) {
	t.Parallel()
	release := match.Release{Namespace: "web", Name: "nginx"}
	summary := func(name string, tier int32, age time.Duration) configv1beta1.ClusterSummary {
		s := configv1beta1.ClusterSummary{}
		s.Name, s.UID = name, types.UID(name)
		s.CreationTimestamp = metav1.NewTime(time.Unix(1e9, 0).Add(-age))
		s.Spec.ClusterProfileSpec.Tier = tier
		s.Spec.ClusterProfileSpec.HelmCharts = []configv1beta1.HelmChart{{ReleaseNamespace: release.Namespace, ReleaseName: release.Name}}
		return s
	}
	managing := func(s configv1beta1.ClusterSummary) configv1beta1.ClusterSummary {
		s.Status.HelmReleaseSummaries = []configv1beta1.HelmChartSummary{{ReleaseName: release.Name, ReleaseNamespace: release.Namespace, Status: configv1beta1.HelmChartStatusManaging}}
		return s
	}
	uninstalling := summary("u", 1, 0)
	uninstalling.Spec.ClusterProfileSpec.HelmCharts[0].HelmChartAction = configv1beta1.HelmChartActionUninstall
	me := summary("me", 100, time.Hour)
	tests := map[string]struct {
		me     configv1beta1.ClusterSummary
		others []configv1beta1.ClusterSummary
		want   []match.Conflict
	}{
		"alone":                      {me: me, others: []configv1beta1.ClusterSummary{me}},
		"a lower tier wins":          {me: managing(me), others: []configv1beta1.ClusterSummary{summary("low", 50, 0), summary("high", 200, 0)}, want: []match.Conflict{{release, "low"}}},
		"the incumbent wins a tie":   {me: me, others: []configv1beta1.ClusterSummary{managing(summary("new", 100, 0))}, want: []match.Conflict{{release, "new"}}},
		"the older wins a tie":       {me: me, others: []configv1beta1.ClusterSummary{summary("old", 100, 2*time.Hour), summary("new", 100, 0)}, want: []match.Conflict{{release, "old"}}},
		"an uninstall wants nothing": {me: me, others: []configv1beta1.ClusterSummary{uninstalling}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(tc.want, match.FindConflicts(&tc.me, tc.others)); diff != "" {
				t.Errorf("FindConflicts() (-want +got):\n%s", diff)
			}
		})
	}
}
