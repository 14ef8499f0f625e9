package hub_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// registerSelfAsPush registers the control plane of w as a push member of its own hub.
func (w *world) registerSelfAsPush(name string) *libv1beta1.SveltosCluster {
	w.Helper()
	raw, err := os.ReadFile(w.plane.Kubeconfig)
	w.must(err)
	w.must(join.RegisterPush(w.Context(), w.plane.Config, join.PushRequest{
		Request: join.Request{Namespace: w.ns, Name: name, Labels: w.prodLabels()}, Kubeconfig: raw,
	}))
	cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
	w.wantCluster(cluster, func(s libv1beta1.SveltosClusterStatus) bool { return s.Ready })
	return cluster
}

func TestPushMembersAreDeregistered(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.plane.Config, hub.Options{InstallCRDs: true, RegisterSelf: true, CacheDir: t.TempDir()})
	w.createConfigMap("manifests", manifest("a"))
	secret := client.ObjectKey{Namespace: w.ns, Name: "one-sveltos-kubeconfig"}
	deployed := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}}
	w.eventually("CRDs are served", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })

	t.Run("withdraws", func(t *testing.T) {
		w.registerSelfAsPush("one")
		profile := w.createProfile(nil)
		w.wantProvisioned(profile, "one")
		result := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}}).wait(w)
		var got []string
		for _, ref := range result.Deleted {
			got = append(got, ref.Kind+" "+ref.Name)
		}
		if err := checkEqual([]string{"SveltosCluster one", "Secret one-sveltos-kubeconfig"}, got); err != nil {
			t.Errorf("deleted %v", err)
		}
		if err := errors.Join(w.checkNotFound(deployed, "default", "a"), w.checkNotFound(&corev1.Secret{}, secret.Namespace, secret.Name)); err != nil {
			t.Error(err)
		}
		w.must(w.Delete(t.Context(), profile))
	})
	t.Run("waits for finalizers", func(t *testing.T) {
		one := w.registerSelfAsPush("one")
		profile := w.createProfile(nil)
		w.wantProvisioned(profile, "one")
		update(w, deployed, func(cm *corev1.ConfigMap) { cm.Finalizers = []string{"example.com/busy"} })
		w.must(w.Delete(t.Context(), profile))
		w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusRemoving})
		update(w, deployed, func(cm *corev1.ConfigMap) { cm.Finalizers = nil })
		w.wantNoSummary(profile, "one")
		w.must(w.Delete(t.Context(), one))
		w.eventually("the cluster is deregistered", func() error { return w.checkNotFound(one, w.ns, "one") })
	})
	t.Run("keeps the deployed objects", func(t *testing.T) {
		w.registerSelfAsPush("one")
		profile := w.createProfile(nil)
		w.wantProvisioned(profile, "one")
		w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}, KeepAddons: true}).wait(w)
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed))
		if deployed.Annotations[kube.AnnotationRequestor] != "" || deployed.Annotations[kube.AnnotationHash] != "" {
			t.Errorf("the object has ownership annotations: %v", deployed.Annotations)
		}
		w.must(w.Delete(t.Context(), profile))
		w.must(w.Delete(t.Context(), deployed))
	})
	t.Run("leaves the objects by force", func(t *testing.T) {
		one := w.registerSelfAsPush("one")
		profile := w.createProfile(nil)
		w.wantProvisioned(profile, "one")
		w.breakKubeconfig(secret)
		w.must(w.Delete(t.Context(), one))
		w.wantMessage(one, "it is unreachable: ")
		result := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}, Wait: -1, Force: true}).wait(w)
		if err := checkEqual([]string{"ConfigMap default/a"}, result.Left); err != nil {
			t.Errorf("left objects: %v", err)
		}
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(deployed), deployed))
		w.must(w.Delete(t.Context(), profile))
	})
	t.Run("the hub itself", func(t *testing.T) {
		self := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: "mgmt", Name: "mgmt"}}
		w.wantCluster(self, func(s libv1beta1.SveltosClusterStatus) bool { return s.Ready && len(self.Finalizers) > 0 })
		w.must(w.Delete(t.Context(), self))
		w.eventually("deletion of the cluster", func() error { return w.checkNotFound(self, "mgmt", "mgmt") })
	})
}

// breakKubeconfig changes the address in a kubeconfig to one without a server.
func (w *world) breakKubeconfig(secret client.ObjectKey) {
	w.Helper()
	held := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: secret.Namespace, Name: secret.Name}}
	update(w, held, func(s *corev1.Secret) {
		for key, raw := range s.Data {
			config, err := clientcmd.Load(raw)
			w.must(err)
			for _, cluster := range config.Clusters {
				cluster.Server = fmt.Sprintf("https://127.0.0.1:%d", 1)
			}
			s.Data[key], err = clientcmd.Write(*config)
			w.must(err)
		}
	})
}
