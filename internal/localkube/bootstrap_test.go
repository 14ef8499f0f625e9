package localkube_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/localkube"
)

// bootstrapToken creates a bootstrap token that expires after lifetime and may sign cluster-info.
func bootstrapToken(t *testing.T, p *localkube.Plane, id string, lifetime time.Duration) {
	t.Helper()
	_, err := clientOf(p).CoreV1().Secrets(metav1.NamespaceSystem).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id},
		Type:       corev1.SecretTypeBootstrapToken,
		StringData: map[string]string{
			"token-id": id, "token-secret": "0123456789abcdef", "usage-bootstrap-signing": "true",
			"usage-bootstrap-authentication": "true", "expiration": time.Now().Add(lifetime).UTC().Format(time.RFC3339),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func TestBootstrapTokenSignsAuthenticatesAndExpires(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	bootstrapToken(t, p, "abcdef", time.Hour)
	bootstrapToken(t, p, "fedcba", 3*time.Second)
	infos := clientOf(p).CoreV1().ConfigMaps(metav1.NamespacePublic)
	_, err := infos.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "cluster-info"}, Data: map[string]string{"kubeconfig": "apiVersion: v1\nkind: Config\n"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "cluster-info is signed", func(ctx context.Context) (bool, string) {
		info, err := infos.Get(ctx, "cluster-info", metav1.GetOptions{})
		return err == nil && info.Data["jws-kubeconfig-abcdef"] != "", fmt.Sprint(err)
	})
	eventually(t, "expired token is removed", func(ctx context.Context) (bool, string) {
		_, err := clientOf(p).CoreV1().Secrets(metav1.NamespaceSystem).Get(ctx, "bootstrap-token-fedcba", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
	config := rest.AnonymousClientConfig(p.Config)
	config.BearerToken = "abcdef.0123456789abcdef"
	_, err = kubernetes.NewForConfigOrDie(config).CoreV1().Secrets(metav1.NamespaceSystem).List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("a bootstrap token must authenticate and may not read secrets: got %v", err)
	}
}

func TestClusterRolesAreAggregated(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	roles := clientOf(p).RbacV1().ClusterRoles()
	label := map[string]string{"aggregate-to": "aggregation-test"}
	for _, role := range []*rbacv1.ClusterRole{
		{ObjectMeta: metav1.ObjectMeta{Name: "aggregation-test"}, AggregationRule: &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: label}}}},
		{ObjectMeta: metav1.ObjectMeta{Name: "aggregation-test-part", Labels: label}, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get"}}}},
	} {
		if _, err := roles.Create(t.Context(), role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "rules are aggregated", func(ctx context.Context) (bool, string) {
		role, err := roles.Get(ctx, "aggregation-test", metav1.GetOptions{})
		return err == nil && len(role.Rules) == 1, fmt.Sprint(err)
	})
}

func TestHealthyPlanePrintsNothing(t *testing.T) {
	t.Parallel()
	p := localkube.ForTest(t, localkube.Named("quiet"))
	if err := p.Stop(); err != nil {
		t.Fatal(err)
	}
	if log := p.Log(); log != "" {
		t.Errorf("a plane that started and stopped printed:\n%s", log)
	}
}
