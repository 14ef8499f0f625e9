package stories

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// decryptPayload returns the payload of a bundle. It reads the key from the Secret in the namespace of the bundle.
func (w *world) decryptPayload(bundle libv1beta1.ConfigurationBundle) []byte {
	w.t.Helper()
	if bundle.Annotations["towline.dev/encryption"] == "" {
		return bundle.Spec.Payload
	}
	secrets := &corev1.SecretList{}
	if err := w.client(w.hub).List(w.t.Context(), secrets, client.InNamespace(bundle.Namespace)); err != nil {
		w.t.Fatal(err)
	}
	for _, secret := range secrets.Items {
		if secret.Type != "towline.dev/content-key" {
			continue
		}
		mac := hmac.New(sha256.New, secret.Data["key"])
		_, _ = mac.Write([]byte("7:encrypt"))
		block, blockErr := aes.NewCipher(mac.Sum(nil))
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err := errors.Join(blockErr, err); err != nil {
			w.t.Fatal(err)
		}
		payload, err := aead.Open(nil, nil, bundle.Spec.Payload, []byte(bundle.Annotations["towline.dev/item"]))
		if err != nil {
			w.t.Fatal(err)
		}
		return payload
	}
	w.t.Fatalf("namespace %s has no key for its encrypted content", bundle.Namespace)
	return nil
}

// wantEncrypted checks that all content in the namespaces of members was encrypted, and no shared content.
func (p *payloads) wantEncrypted(w *world) {
	w.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for namespace, all := range p.all {
		for _, bundle := range all {
			if isEncrypted := bundle.Annotations["towline.dev/encryption"] != ""; isEncrypted == (namespace == kube.AgentNamespace) {
				w.t.Errorf("bundle %s/%s is encrypted: %t", namespace, bundle.Name, isEncrypted)
			}
		}
	}
}
