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

// registerPushCluster creates the Cluster in push mode for the control plane of member, and its Secret.
func (w *world) registerPushCluster(name string, member *world, endpoint string) *clusterv1alpha1.Cluster {
	w.Helper()
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name},
		Data:       map[string][]byte{"token": []byte(member.createToken("hub", "cluster-admin")), "caBundle": member.plane.Config.CAData},
	})
	return w.createReadyCluster(name, clusterv1alpha1.ClusterSpec{
		ID: member.kubeSystemUID(), SyncMode: clusterv1alpha1.Push, APIEndpoint: endpoint,
		SecretRef: &clusterv1alpha1.LocalSecretReference{Namespace: w.ns, Name: name},
	})
}

// createReadyCluster creates a ready Cluster that matches the profiles of the test, with the objects and the finalizer
// that the hub creates for it.
func (w *world) createReadyCluster(name string, spec clusterv1alpha1.ClusterSpec) *clusterv1alpha1.Cluster {
	w.Helper()
	w.must(client.IgnoreAlreadyExists(w.Create(w.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: fleet.ExecutionSpace(name)}})))
	cluster := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: w.prodLabels(), Finalizers: []string{clusterv1alpha1.ClusterFinalizer}, Annotations: map[string]string{kube.AnnotationHub: w.kubeSystemUID()},
		},
		Spec: spec,
	}
	w.create(cluster)
	w.eventually("status of "+name, func() error { return w.patchReady(cluster, metav1.ConditionTrue) })
	return cluster
}

// kubeSystemUID returns the UID of the namespace kube-system, which identifies the control plane of w.
func (w *world) kubeSystemUID() string {
	w.Helper()
	namespace := &corev1.Namespace{}
	w.must(w.Get(w.Context(), client.ObjectKey{Name: metav1.NamespaceSystem}, namespace))
	return string(namespace.UID)
}

// patchReady sets the condition Ready of a Cluster.
func (w *world) patchReady(cluster *clusterv1alpha1.Cluster, ready metav1.ConditionStatus) error {
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
		return err
	}
	cluster.Status.KubernetesVersion = "v1.34.0"
	cluster.Status.Conditions = []metav1.Condition{{
		Type: clusterv1alpha1.ClusterConditionReady, Status: ready, Reason: "Test", Message: "said by a test", LastTransitionTime: metav1.Now(),
	}}
	return w.Status().Update(w.Context(), cluster)
}

// wantState waits until the Resources of profile on a Cluster have the status, and returns the summary.
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

func TestProfileIsDeployedAndWithdrawnOnAPushCluster(t *testing.T) {
	t.Parallel()
	planes := localkube.SeveralForTest(t, []string{"hub", "member"})
	w, member := newWorldOn(t, planes[0]), newWorldOn(t, planes[1])
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	opts := hub.Options{CacheDir: t.TempDir(), DiagnosticsAddress: freeAddress(t)}
	w.start(w.plane.Config, opts)
	cm := w.createConfigMap("manifests", "")
	update(w, cm, func(cm *corev1.ConfigMap) {
		cm.Annotations = map[string]string{libv1beta1.TemplateAnnotation: "ok"}
		cm.Data["content"] = manifest(`{{ printf "a-%s-%s-%s" .Cluster.metadata.name .Cluster.spec.syncMode .Cluster.kind | lower }}`)
	})
	profile := w.createProfile(nil)
	line := newTCPProxy(w, strings.TrimPrefix(member.plane.Config.Host, "https://"))
	one := w.registerPushCluster("one", member, "https://"+line.Addr().String())

	summary := w.wantState(profile, "one", libv1beta1.FeatureStatusProvisioned)
	if summary.Spec.ClusterType != libv1beta1.ClusterTypeKarmada || summary.Spec.ClusterNamespace != "karmada-es-one" || summary.Labels[libv1beta1.ClusterTypeLabel] != "Karmada" {
		t.Errorf("the summary has cluster type %+v and labels %v", summary.Spec.ClusterType, summary.Labels)
	}
	deployed := &corev1.ConfigMap{}
	w.must(member.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "a-one-push-cluster"}, deployed))
	if deployed.Annotations[kube.AnnotationHub] != w.kubeSystemUID() || deployed.Annotations[kube.AnnotationScope] != string(one.UID) {
		t.Errorf("its annotations are %v", deployed.Annotations)
	}
	w.wantListed(profile, "one")
	w.wantSeries(opts, profile)
	w.must(member.Delete(t.Context(), deployed))
	member.eventually("correction of the object", func() error { return member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed) })

	update(w, one, func(c *clusterv1alpha1.Cluster) { delete(c.Labels, "env") })
	w.eventually("it is withdrawn", func() error {
		return errors.Join(member.checkNotFound(deployed, deployed.Namespace, deployed.Name), w.checkNotFound(summary, summary.Namespace, summary.Name))
	})
	update(w, one, func(c *clusterv1alpha1.Cluster) { c.Labels["env"] = "prod" })
	w.wantState(profile, "one", libv1beta1.FeatureStatusProvisioned)

	t.Run("corrects drift with a new token", func(t *testing.T) {
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
		update(w, secret, func(s *corev1.Secret) { s.Data["token"] = []byte(member.createToken("new", "cluster-admin")) })
		w.must(member.Delete(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: member.ns, Name: "hub"}}))
		// Open connections would keep the old token.
		line.cut()
		w.must(member.Delete(t.Context(), deployed))
		w.eventually("correction of the object", func() error { return member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed) })
	})
	t.Run("leaves the objects by force", func(t *testing.T) {
		update(w, one, func(c *clusterv1alpha1.Cluster) {
			c.Spec.APIEndpoint = "https://127.0.0.1:1"
			c.Annotations[kube.AnnotationDeregister] = kube.DeregisterForce
		})
		w.must(w.Delete(t.Context(), one))
		w.eventually("deletion of the summary", func() error {
			// The Cluster may already be deleted, and a controller may have written its status before.
			_ = w.patchReady(one, metav1.ConditionFalse)
			return w.checkNotFound(summary, summary.Namespace, summary.Name)
		})
		w.must(member.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed))
	})
}

// tcpProxy forwards connections to an address until they are cut.
type tcpProxy struct {
	net.Listener
	mu   sync.Mutex // guards open
	open []net.Conn
}

func newTCPProxy(w *world, to string) *tcpProxy {
	w.Helper()
	listener, err := (&net.ListenConfig{}).Listen(w.Context(), "tcp", "127.0.0.1:0")
	w.must(err)
	l := &tcpProxy{Listener: listener}
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

// cut closes all connections. The proxy accepts new connections.
func (l *tcpProxy) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, end := range l.open {
		_ = end.Close()
	}
	l.open = nil
}

// wantSeries waits until the metrics have the series of the Cluster one, with the right type.
func (w *world) wantSeries(opts hub.Options, profile *configv1beta1.ClusterProfile) {
	w.Helper()
	reader := w.createToken("reader", "cluster-admin")
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

func TestProfileIsDeliveredToTheExecutionNamespaceOfAPullCluster(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	opts := hub.Options{CacheDir: t.TempDir(), DiagnosticsAddress: freeAddress(t)}
	w.start(w.plane.Config, opts)
	w.createConfigMap("manifests", manifest("a"))
	// A SveltosCluster of the same name, and another one in an execution namespace.
	w.createReadyMember("two", w.prodLabels())
	two := w.createReadyCluster("two", clusterv1alpha1.ClusterSpec{ID: "another", SyncMode: clusterv1alpha1.Pull})
	now := metav1.NowMicro()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-two", Name: "two"}}
	w.must(client.IgnoreAlreadyExists(w.Create(t.Context(), lease))) // the hub may have created the Lease
	update(w, lease, func(l *coordinationv1.Lease) { l.Spec.RenewTime = &now })
	unrelated := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-two", Name: "two", Labels: w.prodLabels()}, Spec: libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(unrelated)
	w.wantHeartbeat(opts, "two", now.Time)
	profile := w.createProfile(nil)
	w.wantState(profile, "two", libv1beta1.FeatureStatusProvisioning)
	var groups libv1beta1.ConfigurationGroupList
	w.eventually("group", func() error {
		return errors.Join(w.List(t.Context(), &groups, client.InNamespace("karmada-es-two")), checkEqual(1, len(groups.Items)))
	})
	group := &groups.Items[0]
	if group.Labels[libv1beta1.PullClusterNameLabel] != "two" || group.Spec.SourceRef.Namespace != "karmada-es-two" {
		t.Errorf("the group is %+v", group)
	}
	w.wantCluster(unrelated, func(s libv1beta1.SveltosClusterStatus) bool {
		return !s.Ready && strings.Contains(s.FailureMessage, "karmada-es-")
	})

	update(w, two, func(c *clusterv1alpha1.Cluster) { delete(c.Labels, "env") })
	w.eventually("request to the agent to remove the objects", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(group), group); err != nil {
			return err
		}
		return checkEqual(libv1beta1.ActionRemove, group.Spec.Action)
	})
	if _, err := w.getSummary(profile, "two"); err != nil {
		t.Errorf("the SveltosCluster of the same name: %v", err)
	}
}

// wantHeartbeat renews the Lease of a Cluster, and waits until the metrics have the time of the heartbeat.
func (w *world) wantHeartbeat(opts hub.Options, cluster string, at time.Time) {
	w.Helper()
	reader := w.createToken("reader", "cluster-admin")
	series := fmt.Sprintf(`projectsveltos_agent_last_heartbeat_timestamp_seconds{cluster_name=%q,cluster_namespace="karmada-es-%s",cluster_type="Karmada"} %g`,
		cluster, cluster, float64(at.Unix()))
	w.eventually("heartbeat of "+cluster, func() error {
		// The hub may replace the Lease that the test created.
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

// wantListed waits until the status of the profile lists a Cluster, and the ClusterConfiguration lists its objects.
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
