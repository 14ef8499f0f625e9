package hub_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
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
func (w *world) joined(name string, member *world, endpoint string) *clusterv1alpha1.Cluster {
	w.Helper()
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
		Data:       map[string][]byte{"token": []byte(member.token("hub", "cluster-admin")), "caBundle": member.plane.Config.CAData},
	})
	return w.declared(name, clusterv1alpha1.ClusterSpec{
		ID: member.uid(), SyncMode: clusterv1alpha1.Push, APIEndpoint: endpoint,
		SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: w.ns, Name: name},
	})
}

// declared makes a Cluster that matches the profiles of the test, is ready and has all that the hub gives it.
func (w *world) declared(name string, spec clusterv1alpha1.ClusterSpec) *clusterv1alpha1.Cluster {
	w.Helper()
	w.must(client.IgnoreAlreadyExists(w.Create(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(name)}})))
	cluster := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: w.prod(), Finalizers: []string{clusterv1alpha1.ClusterFinalizer}, Annotations: map[string]string{kube.AnnotationHub: w.uid()},
		},
		Spec: spec,
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
	opts := hub.Options{CacheDir: t.TempDir(), DiagnosticsAddress: freeAddress(t)}
	w.start(w.plane.Config, opts)
	cm := w.configMap("manifests", "")
	update(w, cm, func(cm *corev1.ConfigMap) {
		cm.Annotations = map[string]string{libv1beta1.TemplateAnnotation: "ok"}
		cm.Data["content"] = manifest(`{{ printf "a-%s-%s-%s" .Cluster.metadata.name .Cluster.spec.syncMode .Cluster.kind | lower }}`)
	})
	profile := w.profile(nil)
	line := newLine(w, strings.TrimPrefix(member.plane.Config.Host, "https://"))
	one := w.joined("one", member, "https://"+line.Addr().String())

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
	w.wantSeries(opts, profile)
	w.must(member.Delete(t.Context(), deployed))
	member.eventually("it is healed", func() error { return member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed) })

	update(w, one, func(c *clusterv1alpha1.Cluster) { delete(c.Labels, "env") })
	w.eventually("it is withdrawn", func() error {
		return errors.Join(member.gone(deployed, deployed.Namespace, deployed.Name), w.gone(summary, summary.Namespace, summary.Name))
	})
	update(w, one, func(c *clusterv1alpha1.Cluster) { c.Labels["env"] = "prod" })
	w.wantState(profile, "one", libv1beta1.FeatureStatusProvisioned)

	t.Run("and is healed with a new token", func(t *testing.T) {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
		update(w, secret, func(s *corev1.Secret) { s.Data["token"] = []byte(member.token("new", "cluster-admin")) })
		w.must(member.Delete(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: member.ns, Name: "hub"}}))
		// What the old token opened would go on.
		line.cut()
		w.must(member.Delete(t.Context(), deployed))
		w.eventually("it is healed", func() error { return member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed) })
	})
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

// line carries connections to an address until they are cut.
type line struct {
	net.Listener
	mu   sync.Mutex // guards open
	open []net.Conn
}

func newLine(w *world, to string) *line {
	w.Helper()
	listener, err := (&net.ListenConfig{}).Listen(w.Context(), "tcp", "127.0.0.1:0")
	w.must(err)
	l := &line{Listener: listener}
	w.Cleanup(func() {
		_ = l.Close()
		l.cut()
	})
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			l.mu.Lock()
			l.open = append(l.open, near, far)
			l.mu.Unlock()
			go func() { _, _ = io.Copy(far, near) }()
			go func() { _, _ = io.Copy(near, far) }()
		}
	}()
	return l
}

// cut ends all connections; new ones can be made.
func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, end := range l.open {
		_ = end.Close()
	}
	l.open = nil
}

// wantSeries waits until the metrics tell of the Cluster one, as what it is.
func (w *world) wantSeries(opts hub.Options, profile *configv1beta1.ClusterProfile) {
	w.Helper()
	reader := w.token("reader", "cluster-admin")
	cluster := `cluster_name="one",cluster_namespace="karmada-es-one",cluster_type="Karmada"`
	of := `profile_kind="ClusterProfile",profile_name="` + profile.Name + `",profile_namespace=""`
	w.eventually("series", func() error {
		_, body, err := fetch("https://"+opts.DiagnosticsAddress+"/metrics", reader)
		for _, want := range []string{
			"cluster_connectivity_status{" + cluster + "} 0", "kubernetes_version_info{" + cluster + `,kubernetes_version="v1.`,
			"reconcile_outcome_total{" + cluster + `,feature="Resources",` + of + `,status="success"} 1`, "matching_clusters{" + of + "} 1",
			"reconcile_consecutive_failures{" + cluster + `,feature="Resources",` + of + "} 0", "connection_failures{" + cluster + "} 0",
		} {
			if !strings.Contains(body, "\nprojectsveltos_"+want) {
				return fmt.Errorf("no series %s and %w in:\n%s", want, err, body)
			}
		}
		return nil
	})
}

func TestProfileIsLeftForAPullClusterInItsSpace(t *testing.T) {
	w := realWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	opts := hub.Options{CacheDir: t.TempDir(), DiagnosticsAddress: freeAddress(t)}
	w.start(w.plane.Config, opts)
	w.configMap("manifests", manifest("a"))
	// One of the other kind with the same name, and one that is where only Clusters may be.
	w.member("two", w.prod())
	two := w.declared("two", clusterv1alpha1.ClusterSpec{ID: "another", SyncMode: clusterv1alpha1.Pull})
	now := metav1.NowMicro()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-two", Name: "two"}}
	w.must(client.IgnoreAlreadyExists(w.Create(t.Context(), lease))) // the hub can be first
	update(w, lease, func(l *coordinationv1.Lease) { l.Spec.RenewTime = &now })
	unrelated := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-two", Name: "two", Labels: w.prod()}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(unrelated)
	w.wantHeartbeat(opts, "two", now.Time)
	profile := w.profile(nil)
	w.wantState(profile, "two", libv1beta1.FeatureStatusProvisioning)
	var groups libv1beta1.ConfigurationGroupList
	w.eventually("group", func() error {
		return errors.Join(w.List(t.Context(), &groups, client.InNamespace("karmada-es-two")), same(1, len(groups.Items)))
	})
	group := &groups.Items[0]
	if group.Labels[libv1beta1.PullClusterNameLabel] != "two" || group.Spec.SourceRef.Namespace != "karmada-es-two" {
		t.Errorf("the group is %+v", group)
	}
	w.wantCluster(unrelated, func(s libv1beta1.SveltosClusterStatus) bool {
		return !s.Ready && strings.Contains(s.FailureMessage, "karmada-es-")
	})

	update(w, two, func(c *clusterv1alpha1.Cluster) { delete(c.Labels, "env") })
	w.eventually("its agent is told to remove it", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(group), group); err != nil {
			return err
		}
		return same(libv1beta1.ActionRemove, group.Spec.Action)
	})
	if _, err := w.summary(profile, "two"); err != nil {
		t.Errorf("the SveltosCluster of the same name: %v", err)
	}
}

// wantHeartbeat waits until the metrics tell of a heartbeat of the agent of a Cluster, which it gives.
func (w *world) wantHeartbeat(opts hub.Options, cluster string, at time.Time) {
	w.Helper()
	reader := w.token("reader", "cluster-admin")
	series := fmt.Sprintf(`projectsveltos_agent_last_heartbeat_timestamp_seconds{cluster_name=%q,cluster_namespace="karmada-es-%s",cluster_type="Karmada"} %g`,
		cluster, cluster, float64(at.Unix()))
	w.eventually("heartbeat of "+cluster, func() error {
		// The hub makes its own Lease of one that it does not know.
		lease := &coordinationv1.Lease{}
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(cluster), Name: cluster}, lease); err != nil {
			return err
		}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: at}
		if err := w.Update(w.Context(), lease); err != nil {
			return err
		}
		_, body, err := fetch("https://"+opts.DiagnosticsAddress+"/metrics", reader)
		if err == nil && !strings.Contains(body, "\n"+series+"\n") {
			err = fmt.Errorf("no series %s in:\n%s", series, body)
		}
		return err
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
