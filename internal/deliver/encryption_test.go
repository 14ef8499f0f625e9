package deliver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const password = "correct-horse-battery-staple"

func secretObject(name, value string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Secret",
		"metadata":   map[string]any{"namespace": "default", "name": name},
		"stringData": map[string]any{"password": value},
	}}
}

// privateBundle returns a bundle with a Secret and a ConfigMap.
func privateBundle(value string) bundle.Bundle {
	return testBundle(bundle.Item{
		Sensitive: true, OnlySecretsPrivate: true,
		Objects: []*unstructured.Unstructured{secretObject("login", value), configMap("settings", "public")},
	})
}

// announce writes the Lease of m's agent. The agent can decrypt content if announced equals holder.
func (h *hub) announce(m fleet.Member, holder, announced string) {
	h.t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: m.Name}}
	h.create(lease.DeepCopy())
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}},"spec":{"holderIdentity":%q}}`, kube.AnnotationDecrypts, announced, holder)
	if err := h.admin.Patch(h.t.Context(), lease, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		h.t.Fatal(err)
	}
}

// readableNames returns the names of the objects of m's deliveries in which a user without permissions for Secrets
// finds text.
func (h *hub) readableNames(m fleet.Member, text string) []string {
	h.t.Helper()
	var names []string
	bundles := &libv1beta1.ConfigurationBundleList{}
	groups := &libv1beta1.ConfigurationGroupList{}
	for _, list := range []client.ObjectList{bundles, groups} {
		if err := h.admin.List(h.t.Context(), list, client.InNamespace(m.DeliveryNamespace)); err != nil {
			h.t.Fatal(err)
		}
	}
	for _, group := range groups.Items {
		if raw, err := json.Marshal(group); err != nil || bytes.Contains(raw, []byte(text)) {
			names = append(names, group.Name)
		}
	}
	for _, obj := range bundles.Items {
		stream, _ := decompress(obj.Spec.Payload) // fails if the payload is encrypted
		obj.Spec.Payload = append(stream, obj.Spec.Payload...)
		raw, err := json.Marshal(obj.ObjectMeta)
		if err != nil || bytes.Contains(append(raw, obj.Spec.Payload...), []byte(text)) {
			names = append(names, obj.Name)
		}
	}
	return names
}

func (h *hub) rootKeySecret(m fleet.Member) *corev1.Secret {
	h.t.Helper()
	secret := &corev1.Secret{}
	if err := h.admin.Get(h.t.Context(), client.ObjectKey{Namespace: m.DeliveryNamespace, Name: fleet.ContentKeySecret(m.Name)}, secret); err != nil {
		h.t.Fatal(err)
	}
	return secret
}

func TestPrivateContentIsEncrypted(t *testing.T) {
	t.Parallel()
	h := hubOfShard(t, "encryption")
	m := h.createMember("sealed")
	h.announce(m, "pod-2", "pod-2")
	big := privateBundle(password + randomText(3<<20))
	big.ID.Feature = "Helm"
	bundles := []bundle.Bundle{privateBundle(password), big}
	for _, b := range bundles {
		if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
			t.Fatal(err)
		}
	}
	if names := h.readableNames(m, password); len(names) > 0 {
		t.Errorf("the password is readable in %v", names)
	}
	if names := h.readableNames(m, "public"); len(names) == 0 {
		t.Error("objects without secrets are encrypted")
	}
	if writes := h.requests.take("PATCH", "/secrets/"); len(writes) != 1 {
		t.Errorf("the key was written by %v, want one request", writes)
	}
	engine := newMemberEngine()
	log, _ := h.startAgent(m, engine)
	for _, b := range bundles {
		deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		if got, _ := engine.record(b.ID); got.Items[0].Objects[0].Object["stringData"].(map[string]any)["password"] != b.Items[0].Objects[0].Object["stringData"].(map[string]any)["password"] {
			t.Errorf("the agent got another bundle for %s", b.ID)
		}
	}
	if reads := log.take("/secrets"); len(reads) != 1 {
		t.Errorf("the agent has read the key by %v, want one request", reads)
	}
	if err := (&GarbageCollector{Transport: h.pull}).Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names := h.bundleNames(m); len(names) > 0 {
		t.Errorf("content of provisioned groups is not deleted: %v", names)
	}
}

// bundleNames returns the names of the bundles in m's delivery namespace.
func (h *hub) bundleNames(m fleet.Member) []string {
	h.t.Helper()
	list := &libv1beta1.ConfigurationBundleList{}
	if err := h.admin.List(h.t.Context(), list, client.InNamespace(m.DeliveryNamespace)); err != nil {
		h.t.Fatal(err)
	}
	var names []string
	for _, obj := range list.Items {
		names = append(names, obj.Name)
	}
	return names
}

// TestContentFollowsTheVersionOfTheAgent delivers to an agent of an earlier version. The agent is upgraded before it
// applies the content, and later downgraded to the earlier version.
func TestContentFollowsTheVersionOfTheAgent(t *testing.T) {
	t.Parallel()
	h := hubOfShard(t, "agent-version")
	m := h.createMember("aged")
	b := privateBundle(password)
	for _, step := range []struct {
		holder, announced string
		isReadable        bool
	}{{"pod-1", "", true}, {"pod-2", "pod-2", false}, {"pod-3", "pod-2", true}} {
		h.announce(m, step.holder, step.announced)
		if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
			t.Fatal(err)
		}
		if err := (&GarbageCollector{Transport: h.pull}).Collect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if names := h.readableNames(m, password); (len(names) > 0) != step.isReadable {
			t.Errorf("with holder %s the password is readable in %v", step.holder, names)
		}
		// A delivery without changes sends no writes.
		h.requests.take()
		if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
			t.Fatal(err)
		}
		if sent := writes(h.requests.take()); len(sent) > 0 {
			t.Errorf("with holder %s the same delivery sent %v", step.holder, sent)
		}
	}
}

// TestContentIsEncryptedForAFailedGroup upgrades the agent while a bundle fails. The content of the bundle stays on the
// hub.
func TestContentIsEncryptedForAFailedGroup(t *testing.T) {
	t.Parallel()
	h := hubOfShard(t, "failed-group")
	m := h.createMember("failing")
	b := privateBundle(password)
	engine := newMemberEngine()
	engine.refuseObject("settings", "it is refused")
	_, stop := h.startAgent(m, engine)
	deliverUntil(t, h.pull, m, b, bundle.StateFailed)
	stop()
	if names := h.readableNames(m, password); len(names) == 0 {
		t.Fatal("no unencrypted content on the hub")
	}
	h.announce(m, "pod-2", "pod-2")
	if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
		t.Fatal(err)
	}
	if err := (&GarbageCollector{Transport: h.pull}).Collect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names := h.readableNames(m, password); len(names) > 0 {
		t.Errorf("after the upgrade of the agent the password is readable in %v", names)
	}
}

// TestLostKeyIsWrittenAgain deletes or changes the Secret with the key while content waits for the agent.
func TestLostKeyIsWrittenAgain(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(*hub, *corev1.Secret) error{
		"deleted": func(h *hub, secret *corev1.Secret) error { return h.admin.Delete(h.t.Context(), secret) },
		"changed": func(h *hub, secret *corev1.Secret) error {
			secret.Data[keyField] = []byte("another")
			return h.admin.Update(h.t.Context(), secret)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := sharedHub(t)
			m := h.createMember("lost")
			h.announce(m, "pod-2", "pod-2")
			b := privateBundle(password)
			if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
				t.Fatal(err)
			}
			if err := damage(h, h.rootKeySecret(m)); err != nil {
				t.Fatal(err)
			}
			h.startAgent(m, newMemberEngine())
			deliverUntil(t, h.pull, m, b, bundle.StateApplied)
		})
	}
}

// TestContentOfAFormerRegistration registers a cluster again, with another key, while content waits for its agent.
func TestContentOfAFormerRegistration(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("again")
	h.announce(m, "pod-2", "pod-2")
	b := privateBundle(password)
	if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
		t.Fatal(err)
	}
	before := h.rootKeySecret(m)
	m.UID = "another"
	other := privateBundle("x")
	other.ID.Feature = "Helm"
	if _, err := h.pull.Deliver(t.Context(), m, other); err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(h.rootKeySecret(m).Data[keyField], before.Data[keyField]) {
		t.Error("the key of the former registration is still in use")
	}
	h.startAgent(m, newMemberEngine())
	deliverUntil(t, h.pull, m, b, bundle.StateApplied)
}

func TestKeyIsNotWrittenIntoForeignSecret(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("taken")
	h.announce(m, "pod-2", "pod-2")
	own := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: fleet.ContentKeySecret(m.Name)},
		StringData: map[string]string{"mine": password},
	}
	h.create(own)
	_, err := h.pull.Deliver(t.Context(), m, privateBundle(password))
	if err == nil || !strings.Contains(err.Error(), own.Name) || strings.Contains(err.Error(), password) {
		t.Errorf("got %v, want an error that names the Secret", err)
	}
	if names := h.bundleNames(m); len(names) > 0 {
		t.Errorf("content without a key was written: %v", names)
	}
	if got := h.rootKeySecret(m).Data; len(got) != 1 {
		t.Errorf("the Secret has %d fields, want only the fields of its owner", len(got))
	}
}

// TestEncryptedContentIsAuthentic changes encrypted content, and reads it with the credential of another agent.
func TestEncryptedContentIsAuthentic(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m, neighbour := h.createMember("victim"), h.createMember("thief")
	h.announce(m, "pod-2", "pod-2")
	b := testBundle(bundle.Item{Sensitive: true, Objects: []*unstructured.Unstructured{secretObject("login", password)}})
	if _, err := h.pull.Deliver(t.Context(), m, b); err != nil {
		t.Fatal(err)
	}
	group := h.getGroup(m, b.ID)
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: h.bundleNames(m)[0]}
	for name, change := range map[string]func(*libv1beta1.ConfigurationBundle){
		"payload":       func(c *libv1beta1.ConfigurationBundle) { c.Spec.Payload[20]++ },
		"short payload": func(c *libv1beta1.ConfigurationBundle) { c.Spec.Payload = c.Spec.Payload[:5] },
		"header":        func(c *libv1beta1.ConfigurationBundle) { c.Annotations[annotationHeader] += " " },
		"no encryption": func(c *libv1beta1.ConfigurationBundle) { delete(c.Annotations, annotationEncryption) },
	} {
		agent := NewAgentSource(clientFor(t, h.plane.Config), m.DeliveryNamespace, m.Name)
		stored := &libv1beta1.ConfigurationBundle{}
		if err := h.admin.Get(t.Context(), key, stored); err != nil {
			t.Fatal(err)
		}
		change(stored)
		contentKey, err := agent.decrypt(t.Context(), stored)
		if err == nil {
			err = (&decoder{}).add(group.Spec.ConfigurationItems[0], stored, contentKey)
		}
		if !errors.Is(err, ErrCorrupt) {
			t.Errorf("changed %s: got %v, want ErrCorrupt", name, err)
		}
	}
	impersonated := *h.plane.Config
	impersonated.Impersonate.UserName = neighbour.DeliveryNamespace
	thief := NewAgentSource(clientFor(t, &impersonated), m.DeliveryNamespace, m.Name)
	if _, err := thief.readContentKey(t.Context()); !apierrors.IsForbidden(err) {
		t.Errorf("another agent reads the key: %v", err)
	}
	rightKey, err := testKey.contentKeyOf(m)
	if err != nil {
		t.Fatal(err)
	}
	otherKey, err := testKey.contentKeyOf(neighbour)
	if err != nil {
		t.Fatal(err)
	}
	if rightKey.id == otherKey.id || bytes.Equal(rightKey.raw, otherKey.raw) {
		t.Error("two members have the same key")
	}
}

// TestDeliveriesWaitForOneKey delivers concurrently, and checks that the key is written once.
func TestDeliveriesWaitForOneKey(t *testing.T) {
	t.Parallel()
	h := sharedHub(t)
	m := h.createMember("crowd")
	h.announce(m, "pod-2", "pod-2")
	results := make(chan error)
	for _, feature := range []string{"Resources", "Helm", "Kustomize"} {
		b := privateBundle(password)
		b.ID.Feature = feature
		go func(ctx context.Context) {
			_, err := h.pull.Deliver(ctx, m, b)
			results <- err
		}(t.Context())
	}
	for range 3 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	if writes := h.requests.take("PATCH", "/secrets/"); len(writes) != 1 {
		t.Errorf("the key was written by %v, want one request", writes)
	}
}
