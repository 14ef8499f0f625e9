package hub_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// newPrivateWorld returns a world on its own control plane, without a hub.
func newPrivateWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	return newWorldOn(t, localkube.ForTest(t, localkube.Named("real")))
}

// start starts a hub with the default transports. stop can be called more than once.
func (w *world) start(config *rest.Config, opts hub.Options) (stop func()) {
	w.Helper()
	end := startHub(config, opts)
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			w.must(end())
		}
	}
	w.Cleanup(stop)
	return stop
}

func TestChartIsDeployedOnTheHubItself(t *testing.T) {
	w := newPrivateWorld(t)
	w.start(w.plane.Config, hub.Options{InstallCRDs: true, RegisterSelf: true, CacheDir: t.TempDir()})
	repository, err := examples.Repository()
	w.must(err)
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)

	self := &libv1beta1.SveltosCluster{}
	w.eventually("the hub registers itself", func() error {
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: "mgmt", Name: "mgmt"}, self); err != nil {
			return err
		}
		if !self.Status.Ready || self.Status.ConnectionStatus != libv1beta1.ConnectionHealthy || self.Labels["sveltos-agent"] != "present" || len(self.Status.APIVersions) == 0 {
			return fmt.Errorf("its labels are %v, its connection is %+v", self.Labels, self.Status.ConnectionStatus)
		}
		return nil
	})
	w.createConfigMap("manifests", manifest("plain"))
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		s.ClusterSelector.MatchLabels = map[string]string{"sveltos-agent": "present"}
		s.HelmCharts = []configv1beta1.HelmChart{{
			RepositoryURL: server.URL, RepositoryName: "examples", ChartName: "examples/hello", ChartVersion: "v0.1.0",
			ReleaseName: "hello", ReleaseNamespace: "hello", Values: "replicas: 2\n",
		}}
	})
	summary := &configv1beta1.ClusterSummary{}
	w.eventually("both features are provisioned", func() error {
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: "mgmt", Name: profile.Name + "-sveltos-mgmt"}, summary); err != nil {
			return err
		}
		var states []string
		for _, f := range summary.Status.FeatureSummaries {
			states = append(states, fmt.Sprintf("%s %s %s", f.FeatureID, f.Status, f.FailureMessage))
		}
		return checkEqual([]string{"Resources Provisioned ", "Helm Provisioned "}, states)
	})
	if got := summary.Status.HelmReleaseSummaries; len(got) != 1 || got[0].Status != configv1beta1.HelmChartStatusManaging || got[0].ChartVersion != "0.1.0" {
		t.Errorf("helmReleaseSummaries = %+v", got)
	}
	deployment := &appsv1.Deployment{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: "hello", Name: "hello"}, deployment))
	if *deployment.Spec.Replicas != 2 {
		t.Errorf("replicas = %d, want 2", *deployment.Spec.Replicas)
	}
	inventory := &configv1beta1.ClusterConfiguration{}
	w.eventually("inventory", func() error {
		if err := w.Get(t.Context(), client.ObjectKey{Namespace: "mgmt", Name: "sveltos--mgmt"}, inventory); err != nil {
			return err
		}
		if len(inventory.Status.ClusterProfileResources) == 0 {
			return errors.New("no profile is listed yet")
		}
		features := inventory.Status.ClusterProfileResources[0].Features
		if len(features) != 2 || len(features[1].Charts) != 1 || features[1].Charts[0].ReleaseName != "hello" {
			return fmt.Errorf("features are %+v", features)
		}
		return nil
	})

	// The hub creates a deleted object again, without a new delivery.
	w.must(w.Delete(t.Context(), deployment))
	w.eventually("correction of the Deployment", func() error {
		return w.Get(t.Context(), client.ObjectKey{Namespace: "hello", Name: "hello"}, &appsv1.Deployment{})
	})
	w.must(w.Delete(t.Context(), profile))
	w.eventually("deletion of all objects", func() error {
		return errors.Join(
			w.checkNotFound(&appsv1.Deployment{}, "hello", "hello"), w.checkNotFound(&corev1.ConfigMap{}, "default", "plain"),
			w.checkNotFound(profile, "", profile.Name), w.checkNotFound(inventory, "mgmt", "sveltos--mgmt"),
		)
	})
}

func (w *world) checkNotFound(obj client.Object, namespace, name string) error {
	if err := w.Get(w.Context(), client.ObjectKey{Namespace: namespace, Name: name}, obj); !apierrors.IsNotFound(err) {
		return fmt.Errorf("%T %s/%s: got error %w, want not found", obj, namespace, name, err)
	}
	return nil
}

// awaitGroup waits until the test's namespace has one group, with the given action, and returns it.
func (w *world) awaitGroup(action libv1beta1.Action) *libv1beta1.ConfigurationGroup {
	w.Helper()
	var list libv1beta1.ConfigurationGroupList
	w.eventually("group to "+string(action), func() error {
		if err := w.List(w.Context(), &list, client.InNamespace(w.ns)); err != nil {
			return err
		}
		if len(list.Items) != 1 || list.Items[0].Spec.Action != action {
			return fmt.Errorf("groups are %+v", list.Items)
		}
		return nil
	})
	return &list.Items[0]
}

// reportGroup writes the report of an agent about a group.
func (w *world) reportGroup(group *libv1beta1.ConfigurationGroup, status libv1beta1.FeatureStatus) {
	w.Helper()
	before := group.DeepCopy()
	group.Status = libv1beta1.ConfigurationGroupStatus{
		DeploymentStatus: status, DeployedGroupVersionKind: []string{"ConfigMap.v1."},
		ObservedGeneration: group.Generation, ObservedRequestorHash: group.Spec.RequestorHash,
	}
	w.must(w.Status().Patch(context.WithoutCancel(w.Context()), group, client.MergeFrom(before)))
}

func (w *world) countBundles() int {
	w.Helper()
	var list libv1beta1.ConfigurationBundleList
	w.must(w.List(w.Context(), &list))
	return len(list.Items)
}

// installHub applies config/hub.yaml, without the permissions to deploy to the hub's own cluster, and returns the
// client configuration of the hub's ServiceAccount.
func (w *world) installHub() *rest.Config {
	w.Helper()
	raw, err := os.ReadFile("../../config/hub.yaml")
	w.must(err)
	objects, err := kube.DecodeManifest(raw)
	w.must(err)
	for _, obj := range objects {
		if obj.GetKind() != "Deployment" && obj.GetName() != "towline-hub-self" {
			w.must(w.Apply(w.Context(), client.ApplyConfigurationFromUnstructured(obj), client.FieldOwner("test")))
		}
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "towline-hub"}}
	token := &authenticationv1.TokenRequest{}
	w.must(w.SubResource("token").Create(w.Context(), account, token))
	config := rest.AnonymousClientConfig(w.plane.Config)
	config.BearerToken = token.Status.Token
	return config
}

// TestHubContinuesAfterRestart runs the hub with the permissions of config/hub.yaml.
func TestHubContinuesAfterRestart(t *testing.T) {
	w := newPrivateWorld(t)
	config := w.installHub()
	opts := hub.Options{InstallCRDs: true, LeaderElection: true, CacheDir: t.TempDir()}
	stop := w.start(config, opts)
	w.eventually("CRDs", func() error { return w.List(t.Context(), &libv1beta1.SveltosClusterList{}) })
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusProvisioning})
	group := w.awaitGroup(libv1beta1.ActionDeploy)
	if w.countBundles() != 1 {
		t.Errorf("%d bundles, want 1", w.countBundles())
	}

	// The agent finishes while no hub runs.
	stop()
	w.reportGroup(group, libv1beta1.FeatureStatusProvisioned)
	stop = w.start(config, opts)
	w.wantProvisioned(profile, "one")
	w.eventually("deletion of the bundles", func() error { return checkEqual(0, w.countBundles()) })

	// The profile is deleted while no hub runs.
	stop()
	w.must(w.Delete(t.Context(), profile))
	stop = w.start(config, opts)
	group = w.awaitGroup(libv1beta1.ActionRemove)
	stop()
	w.reportGroup(group, libv1beta1.FeatureStatusRemoved)
	w.start(config, opts)
	w.wantNoSummary(profile, "one")
	w.eventually("the profile and the group go", func() error {
		return errors.Join(w.checkNotFound(profile, "", profile.Name), w.checkNotFound(group, group.Namespace, group.Name))
	})
}
