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
	ended     chan struct{}
	departure join.DeregisterResult
	err       error
}

func (w *world) deregister(r join.DeregisterRequest) *runningDeregistration {
	r.Namespace = w.ns
	d := &runningDeregistration{ended: make(chan struct{})}
	go func() {
		defer close(d.ended)
		d.departure, d.err = join.Deregister(w.Context(), w.plane.Config, r)
	}()
	return d
}

// wait returns the result of the deregistration.
func (d *runningDeregistration) wait(w *world) join.DeregisterResult {
	w.Helper()
	<-d.ended
	w.must(d.err)
	return d.departure
}

// removeAgentWhenOrdered waits until the agent is ordered to remove itself, and reports that it has done so. It fails
// if the order comes before all summaries are withdrawn.
func (w *world) removeAgentWhenOrdered(cluster *libv1beta1.SveltosCluster) {
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
		w.Errorf("the agent is removed before %s is withdrawn", summaries.Items[0].Name)
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

func (w *world) wantClusterGone(name string) {
	w.Helper()
	w.eventually("cluster "+name+" goes", func() error { return w.checkNotFound(&libv1beta1.SveltosCluster{}, w.ns, name) })
}

// registration lists the objects on the hub for a pull member.
func (w *world) registration(name, delivery string) []client.Object {
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

func (w *world) wantNone(objects []client.Object) {
	w.Helper()
	for _, obj := range objects {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); !apierrors.IsNotFound(err) {
			w.Errorf("left: %T %s (%v)", obj, client.ObjectKeyFromObject(obj), err)
		}
	}
}

func (w *world) wantAll(objects []client.Object) {
	w.Helper()
	for _, obj := range objects {
		if err := w.Get(w.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			w.Errorf("missing: %T: %v", obj, err)
		}
	}
}

func TestDeregisterWithdrawsThenAgentThenIdentity(t *testing.T) {
	for name, keep := range map[string]bool{"withdraw": false, "keep-addons": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.configMap("manifests", manifest("a"))
			one := w.member("one", w.prod())
			w.member("two", w.prod())
			profile := w.profile(nil)
			summary := w.wantProvisioned(profile, "one")
			w.wantProvisioned(profile, "two")
			// The ClusterConfiguration lists the objects that stay.
			w.eventually("the objects of one are listed", func() error {
				return w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: "sveltos--one"}, &configv1beta1.ClusterConfiguration{})
			})
			// A pause does not stop a deregistration.
			update(w, one, func(c *libv1beta1.SveltosCluster) { c.Spec.Paused = true })
			update(w, profile, func(p *configv1beta1.ClusterProfile) {
				p.Annotations = map[string]string{libv1beta1.ProfilePausedAnnotation: "true"}
			})

			d := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}, KeepAddons: keep})
			w.removeAgentWhenOrdered(one)
			departure := d.wait(w)
			want := []bundle.Withdrawal{{ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: summary.Name, Feature: "Resources"}, Orphan: keep}}
			if err := same(want, w.withdrawals()); err != nil {
				t.Errorf("withdrawals %v", err)
			}
			var left []string
			if keep {
				left = []string{"ConfigMap default/a"}
			}
			if err := same(left, departure.Left); err != nil {
				t.Errorf("left %v", err)
			}
			kinds := make([]string, 0, len(departure.Deleted))
			for _, ref := range departure.Deleted {
				kinds = append(kinds, ref.Kind)
			}
			if !slices.Contains(kinds, "SveltosCluster") || !slices.Contains(kinds, "ServiceAccount") || !slices.Contains(kinds, "Lease") {
				t.Errorf("deleted %v", departure.Deleted)
			}
			w.wantNone(w.registration("one", w.ns))
			w.wantAll(w.registration("two", w.ns+"--two"))
			w.wantProvisioned(profile, "two")
			if err := same([]string{"ConfigMap default/a"}, w.refs("two", "Resources")); err != nil {
				t.Errorf("two has %v", err)
			}
			namespace := &corev1.Namespace{}
			w.must(w.Get(t.Context(), client.ObjectKey{Name: w.ns}, namespace))
			if holder := namespace.Annotations[kube.AnnotationDeliveryHolder]; holder != "" {
				t.Errorf("the namespace still carries the deliveries of %s", holder)
			}
		})
	}
}

func TestKubectlDeleteDeregistersToo(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	w.member("one", w.prod())
	two := w.member("two", w.prod())
	profile := w.profile(nil)
	w.wantProvisioned(profile, "two")
	w.must(w.Delete(t.Context(), two))
	w.removeAgentWhenOrdered(two)
	w.wantClusterGone("two")
	w.wantNone(w.registration("two", w.ns+"--two"))
	w.wantAll(w.registration("one", w.ns))
	if got := w.refs("two", "Resources"); got != nil {
		t.Errorf("two still has %v", got)
	}
	w.eventually("delivery namespace goes", func() error { return w.checkNotFound(&corev1.Namespace{}, "", w.ns+"--two") })
}

// ownWorld returns a private control plane, whose hub the test can stop and start again.
func ownWorld(t *testing.T, name string) (w *world, run func() (stop func())) {
	t.Helper()
	return ownWorldWith(t, name, hub.Options{})
}

// ownWorldWith is ownWorld for a hub with these options and with the transport of the test.
func ownWorldWith(t *testing.T, name string, opts hub.Options) (w *world, run func() (stop func())) {
	t.Helper()
	t.Parallel()
	w = worldOn(t, localkube.ForTest(t, localkube.Named(name)))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	own := &routingTransport{tests: map[string]*fakeTransport{w.ns: w.fakeTransport}}
	opts.Transports = map[fleet.Mode]deliver.Transport{fleet.Push: own, fleet.Pull: own}
	return w, func() (stop func()) { return w.start(w.plane.Config, opts) }
}

func TestGracePeriodForces(t *testing.T) {
	w := newWorld(t)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one-sveltos-kubeconfig"}, Data: map[string][]byte{"kubeconfig": []byte("{")}}
	w.create(secret)
	w.configMap("manifests", manifest("a"))
	one := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one", Labels: w.prod()},
		Spec:       libv1beta1.SveltosClusterSpec{CleanupGracePeriod: &metav1.Duration{Duration: 4 * time.Second}},
	}
	w.create(one)
	w.setReady(one)
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")
	w.set(func(m *fakeTransport) {
		m.refuse = func(bundle.Withdrawal) (bool, error) { return false, errors.New("no route") }
	})
	w.must(w.Delete(t.Context(), one))
	w.wantMessage(one, "it is unreachable: ")
	w.wantClusterGone("one")
	w.wantNoSummary(profile, "one")
	// A Secret that no registration has created belongs to the user.
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(secret), secret))
}

func TestDeletedNamespaceOfAClusterBlocksNothing(t *testing.T) {
	w := newWorld(t)
	w.configMap("manifests", manifest("a"))
	one := w.member("one", w.prod())
	w.member("two", w.prod())
	profile := w.profile(nil)
	w.wantProvisioned(profile, "one")
	w.wantProvisioned(profile, "two")
	w.set(func(m *fakeTransport) { m.refuse = func(bundle.Withdrawal) (bool, error) { return false, nil } })
	w.must(w.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.ns}}))
	w.eventually("both namespaces go", func() error {
		return errors.Join(w.checkNotFound(&corev1.Namespace{}, "", w.ns), w.checkNotFound(&corev1.Namespace{}, "", w.ns+"--two"))
	})
	w.wantNone([]client.Object{&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: w.ns + ":" + one.Name}}})
}

func TestNeverConnectedClusterIsDeregisteredAtOnce(t *testing.T) {
	w := newWorld(t)
	one := w.createMember("one", nil)
	w.eventually("it is registered", func() error {
		return w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "one"}, &corev1.ServiceAccount{})
	})
	w.wantMessage(one, "")
	departure := w.deregister(join.DeregisterRequest{Request: join.Request{Name: "one"}}).wait(w)
	if departure.Forced || departure.Left != nil {
		t.Errorf("departure = %+v", departure)
	}
	w.wantNone(w.registration("one", w.ns))
}

func TestDeregistrationSurvivesRestartsOfTheHub(t *testing.T) {
	w, run := ownWorld(t, "restart")
	stop := run()
	w.configMap("manifests", manifest("a"))
	one := w.member("one", w.prod())
	profile := w.profile(nil)
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
	w.removeAgentWhenOrdered(one)
	// An earlier run of the hub may have deleted some objects.
	w.must(w.Delete(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}))
	run()
	w.wantClusterGone("one")
	w.wantNone(w.registration("one", w.ns))
	w.must(w.Delete(t.Context(), profile))
	w.eventually("profile goes", func() error { return w.checkNotFound(profile, "", profile.Name) })
}
