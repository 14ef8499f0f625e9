package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// joined registers the control plane of member by hand, as a Cluster in push mode that answers.
func (w *world) joined(name string, member *world) *clusterv1alpha1.Cluster {
	w.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "hub"}}
	member.create(account)
	member.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "hub"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "hub"}},
	})
	token := &authenticationv1.TokenRequest{}
	w.must(member.SubResource("token").Create(w.Context(), account, token))
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
		Data:       map[string][]byte{"token": []byte(token.Status.Token), "caBundle": member.plane.Config.CAData},
	}
	w.create(secret)
	w.must(client.IgnoreAlreadyExists(w.Create(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(name)}})))
	cluster := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: w.prod(), Finalizers: []string{clusterv1alpha1.ClusterFinalizer}, Annotations: map[string]string{kube.AnnotationHub: w.uid()},
		},
		Spec: clusterv1alpha1.ClusterSpec{
			ID: member.uid(), SyncMode: clusterv1alpha1.Push, APIEndpoint: member.plane.Config.Host,
			SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: secret.Namespace, Name: secret.Name},
		},
	}
	w.create(cluster)
	w.eventually("status of "+name, func() error { return w.answers(cluster, metav1.ConditionTrue) })
	return cluster
}

// uid is what tells the control plane of w from all others.
func (w *world) uid() string {
	w.Helper()
	namespace := &corev1.Namespace{}
	w.must(w.Get(w.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, namespace))
	return string(namespace.UID)
}

// answers says of a Cluster whether it is ready.
func (w *world) answers(cluster *clusterv1alpha1.Cluster, ready metav1.ConditionStatus) error {
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
		return err
	}
	cluster.Status.KubernetesVersion = "v1.34.0"
	cluster.Status.Conditions = []metav1.Condition{{
		Type: clusterv1alpha1.ClusterConditionReady, Status: ready, Reason: "Test", Message: "said by a test", LastTransitionTime: metav1.Now(),
	}}
	return w.Status().Update(w.Context(), cluster)
}

// wantState waits until the Resources of profile on a Cluster are as said, and returns the summary.
func (w *world) wantState(profile *configv1beta1.ClusterProfile, cluster string, want libv1beta1.FeatureStatus) *configv1beta1.ClusterSummary {
	w.Helper()
	summary := &configv1beta1.ClusterSummary{}
	w.eventually(fmt.Sprintf("Resources on %s are %s", cluster, want), func() error {
		at := client.ObjectKey{Namespace: fleet.ExecutionSpace(cluster), Name: profile.Name + "-karmada-" + cluster}
		if err := w.Get(w.Context(), at, summary); err != nil {
			return err
		}
		if s := summary.Status.FeatureSummaries; len(s) != 1 || s[0].Status != want {
			return fmt.Errorf("features are %+v", s)
		}
		return nil
	})
	return summary
}

func TestProfileLandsOnAPushClusterAndLeavesIt(t *testing.T) {
	t.Parallel()
	planes := localkube.SeveralForTest(t, []string{"hub", "member"})
	w, member := worldOn(t, planes[0]), worldOn(t, planes[1])
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	w.start(w.plane.Config, hub.Options{CacheDir: t.TempDir()})
	cm := w.configMap("manifests", "")
	update(w, cm, func(cm *corev1.ConfigMap) {
		cm.Annotations = map[string]string{libv1beta1.TemplateAnnotation: "ok"}
		cm.Data["content"] = manifest(`{{ printf "a-%s-%s-%s" .Cluster.metadata.name .Cluster.spec.syncMode .Cluster.kind | lower }}`)
	})
	profile := w.profile(nil)
	one := w.joined("one", member)

	summary := w.wantState(profile, "one", libv1beta1.FeatureStatusProvisioned)
	if summary.Spec.ClusterType != libv1beta1.ClusterTypeKarmada || summary.Spec.ClusterNamespace != "karmada-es-one" || summary.Labels[libv1beta1.ClusterTypeLabel] != "Karmada" {
		t.Errorf("the summary is about %+v, %v", summary.Spec.ClusterType, summary.Labels)
	}
	deployed := &corev1.ConfigMap{}
	w.must(member.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "a-one-push-cluster"}, deployed))
	if deployed.Annotations[kube.AnnotationHub] != w.uid() || deployed.Annotations[kube.AnnotationScope] != string(one.UID) {
		t.Errorf("it is marked %v", deployed.Annotations)
	}
	w.wantListed(profile, "one")
	w.must(member.Delete(t.Context(), deployed))
	member.eventually("it is healed", func() error { return member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed) })

	// What nodes and pods do is no news for summaries; what a template sees is.
	update(w, one, func(c *clusterv1alpha1.Cluster) { delete(c.Labels, "env") })
	w.eventually("it is withdrawn", func() error {
		return errors.Join(member.gone(deployed, deployed.Namespace, deployed.Name), w.gone(summary, summary.Namespace, summary.Name))
	})
	update(w, one, func(c *clusterv1alpha1.Cluster) { c.Labels["env"] = "prod" })
	w.wantState(profile, "one", libv1beta1.FeatureStatusProvisioned)

	t.Run("and is left behind by force", func(t *testing.T) {
		update(w, one, func(c *clusterv1alpha1.Cluster) {
			c.Spec.APIEndpoint = "https://127.0.0.1:1"
			c.Annotations[kube.AnnotationDeregister] = kube.DeregisterForce
		})
		w.must(w.Delete(t.Context(), one))
		w.eventually("the summary goes", func() error {
			// The Cluster may be gone by now, and whoever looks after it may have said so first.
			_ = w.answers(one, metav1.ConditionFalse)
			return w.gone(summary, summary.Namespace, summary.Name)
		})
		w.must(member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed))
	})
}

// wantListed waits until the profile says that it matches a Cluster, and the inventory of that says what it has.
func (w *world) wantListed(profile *configv1beta1.ClusterProfile, cluster string) {
	w.Helper()
	want := corev1.ObjectReference{APIVersion: "cluster.karmada.io/v1alpha1", Kind: "Cluster", Name: cluster}
	w.eventually("the Cluster is listed", func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(profile), profile); err != nil {
			return err
		}
		if !slices.Contains(profile.Status.MatchingClusters, want) {
			return fmt.Errorf("matching clusters are %v", profile.Status.MatchingClusters)
		}
		inventory := &configv1beta1.ClusterConfiguration{}
		return w.Get(w.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(cluster), Name: "karmada--" + cluster}, inventory)
	})
}
