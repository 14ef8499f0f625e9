package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// runningDeregistration is a deregistration that runs concurrently with the test.
type runningDeregistration struct {
	ended  chan struct{}
	result join.DeregisterResult
	err    error
}

func (w *world) deregister(r join.DeregisterRequest) *runningDeregistration {
	r.Namespace = w.ns
	d := &runningDeregistration{ended: make(chan struct{})}
	go func() {
		defer close(d.ended)
		d.result, d.err = join.Deregister(w.Context(), w.plane.Config, r)
	}()
	return d
}

// wait returns the result of the deregistration.
func (d *runningDeregistration) wait(w *world) join.DeregisterResult {
	w.Helper()
	<-d.ended
	w.must(d.err)
	return d.result
}

// confirmAgentRemoval waits until the hub requests the removal of the agent, and confirms it. It fails if the hub
// requests the removal before all summaries are withdrawn.
func (w *world) confirmAgentRemoval(cluster *libv1beta1.SveltosCluster) {
	w.Helper()
	w.eventually("order to the agent of "+cluster.Name, func() error {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if cluster.DeletionTimestamp.IsZero() || cluster.Annotations[kube.AnnotationAgentRequest] != kube.AgentRequestRemove {
			return fmt.Errorf("annotations are %v", cluster.Annotations)
		}
		return nil
	})
	w.wantMessage(cluster, "deregistering: waiting for its agent to remove itself")
	var summaries configv1beta1.ClusterSummaryList
	w.must(w.List(w.Context(), &summaries, client.InNamespace(w.ns), client.MatchingLabels{libv1beta1.ClusterNameLabel: cluster.Name}))
	if len(summaries.Items) > 0 {
		w.Errorf("the hub requests the removal of the agent before %s is withdrawn", summaries.Items[0].Name)
	}
	before := cluster.DeepCopy()
	cluster.Status.AgentRemovedAt = &metav1.Time{Time: time.Now()}
	w.must(w.Status().Patch(w.Context(), cluster, client.MergeFrom(before)))
}

// wantMessage waits until the failureMessage of a cluster contains text.
func (w *world) wantMessage(cluster *libv1beta1.SveltosCluster, text string) {
	w.Helper()
	w.wantCluster(cluster, func(s libv1beta1.SveltosClusterStatus) bool { return strings.Contains(s.FailureMessage, text) })
}

func (w *world) wantClusterDeleted(name string) {
	w.Helper()
	w.eventually("deletion of cluster "+name, func() error { return w.checkNotFound(&libv1beta1.SveltosCluster{}, w.ns, name) })
}

// registrationObjects returns the objects of a pull member's registration.
func (w *world) registrationObjects(name, delivery string) []client.Object {
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: meta(w.ns, name)}, &rbacv1.Role{ObjectMeta: meta(w.ns, name)},
		&rbacv1.RoleBinding{ObjectMeta: meta(w.ns, name)}, &corev1.Secret{ObjectMeta: meta(w.ns, join.AnchorSecret(name))},
		&coordinationv1.Lease{ObjectMeta: meta(delivery, name)},
		&rbacv1.RoleBinding{ObjectMeta: meta(kube.AgentNamespace, w.ns+":"+name)},
	}
}

func (w *world) wantNoObjects(objects []client.Object) {
	w.Helper()
	for _, obj := range objects {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); !apierrors.IsNotFound(err) {
			w.Errorf("left: %T %s (%v)", obj, client.ObjectKeyFromObject(obj), err)
		}
	}
}

func (w *world) wantObjects(objects []client.Object) {
	w.Helper()
	for _, obj := range objects {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			w.Errorf("missing: %T: %v", obj, err)
		}
	}
}

func TestDeregisterWithdrawsObjectsThenAgentThenIdentity(t *testing.T) {
	for name, keep := range map[string]bool{"withdraw": false, "keep-addons": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.createConfigMap("manifests", manifest("a"))
			one := w.createReadyMember("one", w.prodLabels())
			w.createReadyMember("two", w.prodLabels())
			profile := w.createProfile(nil)
			summary := w.wantProvisioned(profile, "one")
			w.wantProvisioned(profile, "two")
			// The ClusterConfiguration lists the remaining objects.
			w.eventually("the objects of one are listed", func() error {
				return w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--one"}, &configv1beta1.ClusterConfiguration{})
			})
			// A pause does not stop a deregistration.
			update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true })
			update(w, profile, func(p *configv1beta1.ClusterProfile) {
				p.Annotations = map[string]string{libv1beta1.ProfilePausedAnnotation: "true"}
			})

			d := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}, KeepAddons: keep})
			w.confirmAgentRemoval(one)
			result := d.wait(w)
			want := []bundle.Withdrawal{{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: summary.Name, Feature: "Resources"}, Orphan: keep}}
			if err := checkEqual(want, w.withdrawals()); err != nil {
				t.Errorf("withdrawals %v", err)
			}
			var left []string
			if keep {
				left = []string{"ConfigMap default/a"}
			}
			if err := checkEqual(left, result.Left); err != nil {
				t.Errorf("left objects: %v", err)
			}
			kinds := make([]string, 0, len(result.Deleted))
			for _, ref := range result.Deleted {
				kinds = append(kinds, ref.Kind)
			}
			if !slices.Contains(kinds, "SveltosCluster") || !slices.Contains(kinds, "ServiceAccount") || !slices.Contains(kinds, "Lease") {
				t.Errorf("deleted %v", result.Deleted)
			}
			w.wantNoObjects(w.registrationObjects("one", w.ns))
			w.wantObjects(w.registrationObjects("two", w.ns+"--two"))
			w.wantProvisioned(profile, "two")
			if err := checkEqual([]string{"ConfigMap default/a"}, w.refs("two", "Resources")); err != nil {
				t.Errorf("objects on two: %v", err)
			}
			namespace := &corev1.Namespace{}
			w.must(w.Get(t.Context(), client.ObjectKey{Name: w.ns}, namespace))
			if holder := namespace.Annotations[kube.AnnotationDeliveryHolder]; holder != "" {
				t.Errorf("the namespace is still claimed by %s", holder)
			}
		})
	}
}

func TestKubectlDeleteDeregistersMember(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	w.createReadyMember("one", w.prodLabels())
	two := w.createReadyMember("two", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "two")
	w.must(w.Delete(t.Context(), two))
	w.confirmAgentRemoval(two)
	w.wantClusterDeleted("two")
	w.wantNoObjects(w.registrationObjects("two", w.ns+"--two"))
	w.wantObjects(w.registrationObjects("one", w.ns))
	if got := w.refs("two", "Resources"); got != nil {
		t.Errorf("objects on two: got %v, want none", got)
	}
	w.eventually("deletion of the delivery namespace", func() error { return w.checkNotFound(&corev1.Namespace{}, "", w.ns+"--two") })
}

// newRestartableWorld returns a world on its own control plane, and a function that starts its hub.
func newRestartableWorld(t *testing.T, name string) (w *world, run func() (stop func())) {
	t.Helper()
	return newRestartableWorldWith(t, name, hub.Options{})
}

// newRestartableWorldWith is newRestartableWorld for a hub with options and with the transport of the test.
func newRestartableWorldWith(t *testing.T, name string, opts hub.Options) (w *world, run func() (stop func())) {
	t.Helper()
	t.Parallel()
	w = newWorldOn(t, localkube.ForTest(t, localkube.Named(name)))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	own := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	opts.Transports = map[fleet.Mode]deliver.Transport{fleet.Push: own, fleet.Pull: own}
	return w, func() (stop func()) { return w.start(w.plane.Config, opts) }
}

func TestGracePeriodForcesDeregistration(t *testing.T) {
	w := newWorld(t)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one-sveltos-kubeconfig"}, Data: map[string][]byte{"kubeconfig": []byte("{")}}
	w.create(secret)
	w.createConfigMap("manifests", manifest("a"))
	one := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one", Labels: w.prodLabels()},
		Spec:       libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: 4 * time.Second}},
	}
	w.create(one)
	w.setReady(one)
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	w.set(func(m *fakeTransport) {
		m.refuse = func(bundle.Withdrawal) (bool, error) { return false, errors.New("no route") }
	})
	w.must(w.Delete(t.Context(), one))
	w.wantMessage(one, "it is unreachable: ")
	w.wantClusterDeleted("one")
	w.wantNoSummary(profile, "one")
	// A Secret that no registration has created belongs to the user.
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
}

func TestClusterNamespaceCanBeDeleted(t *testing.T) {
	w := newWorld(t)
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	w.createReadyMember("two", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")
	w.wantProvisioned(profile, "two")
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	w.must(w.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}))
	w.eventually("deletion of both namespaces", func() error {
		return errors.Join(w.checkNotFound(&corev1.Namespace{}, "", w.ns), w.checkNotFound(&corev1.Namespace{}, "", w.ns+"--two"))
	})
	w.wantNoObjects([]client.Object{&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: w.ns + ":" + one.Name}}})
}

func TestNeverConnectedClusterIsDeregisteredAtOnce(t *testing.T) {
	w := newWorld(t)
	one := w.createMember("one", nil)
	w.eventually("registration of the cluster", func() error {
		return w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "one"}, &corev1.ServiceAccount{})
	})
	w.wantMessage(one, "")
	result := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}}).wait(w)
	if result.Forced || result.Left != nil {
		t.Errorf("departure = %+v", result)
	}
	w.wantNoObjects(w.registrationObjects("one", w.ns))
}

func TestDeregistrationContinuesAfterHubRestart(t *testing.T) {
	w, run := newRestartableWorld(t, "restart")
	stop := run()
	w.createConfigMap("manifests", manifest("a"))
	one := w.createReadyMember("one", w.prodLabels())
	profile := w.createProfile(nil)
	w.wantProvisioned(profile, "one")

	stop()
	w.must(w.Delete(t.Context(), one))
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	stop = run()
	w.wantMessage(one, "to be withdrawn")
	w.wantFeature(profile, "one", configv1beta1.FeatureSummary{FeatureID: libv1beta1.FeatureResources, Status: libv1beta1.FeatureStatusAgentRemoving})

	stop()
	w.set(func(m *fakeTransport) { m.refuse = nil })
	stop = run()
	w.wantMessage(one, "its agent to remove itself")

	stop()
	w.confirmAgentRemoval(one)
	// An earlier run of the hub may have deleted some objects.
	w.must(w.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}))
	run()
	w.wantClusterDeleted("one")
	w.wantNoObjects(w.registrationObjects("one", w.ns))
	w.must(w.Delete(t.Context(), profile))
	w.eventually("deletion of the profile", func() error { return w.checkNotFound(profile, "", profile.Name) })
}
