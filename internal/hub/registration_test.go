package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// awaitManifest waits until the hub has the manifest of a cluster's agent, and returns its Secret.
func (w *world) awaitManifest(name string) *corev1.Secret {
	w.Helper()
	secret := &corev1.Secret{}
	w.eventually("manifest of "+name, func() error {
		if err := w.Get(w.Context(), client.ObjectKey{Namespace: w.ns, Name: join.RegistrationSecret(name)}, secret); err != nil {
			return err
		}
		if len(secret.Data[join.ManifestKey]) == 0 {
			return errors.New("no manifest in the Secret")
		}
		return nil
	})
	return secret
}

func TestSveltosClusterObjectIsRegistered(t *testing.T) {
	w := newWorld(t)
	one, two := w.createMember("one", nil), w.createMember("two", nil)
	w.awaitManifest("one")
	secret := w.awaitManifest("two")
	deliveries := map[string]bool{}
	for _, cluster := range []*libv1beta1.SveltosCluster{one, two} {
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster))
		if !controllerutil.ContainsFinalizer(cluster, kube.FinalizerCluster) {
			t.Errorf("finalizers of %s = %v", cluster.Name, cluster.Finalizers)
		}
		delivery := w.ns
		if own := cluster.Annotations[kube.AnnotationDeliveryNS]; own != "" {
			delivery = own
		}
		deliveries[delivery] = true
		w.wantObjects(w.registrationObjects(cluster.Name, delivery))
	}
	if len(deliveries) != 2 {
		t.Errorf("delivery namespaces: %v", deliveries)
	}

	// The next check restores changed and deleted objects.
	w.must(w.Delete(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}))
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Labels = map[string]string{"env": "test"} })
	w.eventually("the ServiceAccount is back", func() error {
		return w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "one"}, &corev1.ServiceAccount{})
	})

	// The agent has registered: the manifest is deleted.
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(two), two))
	w.setReady(two)
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: w.ns, Name: "two"}
	if own := two.Annotations[kube.AnnotationDeliveryNS]; own != "" {
		key.Namespace = own
	}
	w.must(w.Get(t.Context(), key, lease))
	update(w, lease, func(l *coordinationv1.Lease) {
		metav1.SetMetaDataAnnotation(&l.ObjectMeta, kube.AnnotationExchanged, string(secret.UID))
	})
	w.eventually("deletion of the manifest", func() error { return w.checkNotFound(&corev1.Secret{}, w.ns, secret.Name) })
	w.awaitManifest("one")
}

func TestTakenNameIsReported(t *testing.T) {
	w := newWorld(t)
	foreign := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one"}}
	w.create(foreign)
	one := w.createMember("one", nil)
	w.wantMessage(one, "registering: ServiceAccount "+w.ns+"/one exists and was not made by a registration")
	w.eventually("event", func() error {
		all := w.listEvents(one)
		if !slices.ContainsFunc(all, func(e string) bool {
			return strings.HasPrefix(e, "Warning NotRegistered ServiceAccount "+w.ns+"/one")
		}) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	// The deregistration deletes no objects of other clusters.
	w.must(w.Delete(t.Context(), one))
	w.wantClusterDeleted("one")
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(foreign), foreign))

	again := w.createMember("one", nil)
	w.wantMessage(again, "registering: ")
	w.must(w.Delete(t.Context(), foreign))
	w.awaitManifest("one")
	w.wantCluster(again, func(s libv1beta1.SveltosClusterStatus) bool { return s.FailureMessage == "" })
}

func TestInvalidAgentPatchesAreReported(t *testing.T) {
	w := newWorld(t)
	one := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one", Annotations: map[string]string{libv1beta1.AgentConfigAnnotation: w.ns + "/patches"}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(one)
	w.wantMessage(one, "registering: patches of the agent's manifest: ConfigMap "+w.ns+"/patches, which annotation ")
	w.eventually("event", func() error {
		if all := w.listEvents(one); !slices.ContainsFunc(all, func(e string) bool { return strings.Contains(e, "ConfigMap "+w.ns+"/patches") }) {
			return fmt.Errorf("events are %q", all)
		}
		return nil
	})
	w.create(&corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "patches"}, Data: map[string]string{"labels": "{kind: Namespace, metadata: {labels: {team: platform}}}"},
	})
	if manifest := w.awaitManifest("one"); !strings.Contains(string(manifest.Data[join.ManifestKey]), "team: platform") {
		t.Error("the manifest is not patched")
	}
	w.wantCluster(one, func(s libv1beta1.SveltosClusterStatus) bool { return s.FailureMessage == "" })
}

func TestInvalidAgentOptionsAreReported(t *testing.T) {
	w := newWorld(t)
	one := &libv1beta1.SveltosCluster{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "one", Annotations: map[string]string{kube.AnnotationAgentOptions: `{"imagee":"x"}`}},
		Spec:       libv1beta1.SveltosClusterSpec{PullMode: true},
	}
	w.create(one)
	w.wantMessage(one, "imagee")
	update(w, one, func(c *libv1beta1.SveltosCluster) { c.Annotations[kube.AnnotationAgentOptions] = `{"image":"x:1"}` })
	if manifest := w.awaitManifest("one"); !strings.Contains(string(manifest.Data[join.ManifestKey]), "x:1") {
		t.Error("the manifest does not name the image")
	}
}
