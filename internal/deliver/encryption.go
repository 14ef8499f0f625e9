package deliver

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// annotationEncryption has the ID of the contentKey. It is on encrypted content and on the groups that refer to it.
	annotationEncryption = "towline.dev/encryption"
	// contentKeySecretType is the type of the Secret with a contentKey. The type of a Secret is immutable, so the hub
	// cannot overwrite a Secret of another client.
	contentKeySecretType corev1.SecretType = "towline.dev/content-key"
	// encryptionAlgorithm is the prefix of the IDs of keys. A later version with another algorithm uses another prefix.
	encryptionAlgorithm = "aes256gcm-"
)

// contentKey encrypts the private content of one member. The hub derives it from its Key, and writes it to the Secret
// fleet.ContentKeySecret, which only this member's agent may read.
type contentKey struct {
	id  string
	raw []byte
	// mac is the HMAC key of content hashes. Without it, nobody can test a guess of the content against its hash.
	mac  []byte
	aead cipher.AEAD
}

// contentKeyOf returns the key of a member. A cluster that is registered again has another UID and another key.
func (k Key) contentKeyOf(m fleet.Member) (*contentKey, error) {
	return newContentKey(hmacOf(k, "content", string(m.Type), m.Namespace, m.Name, m.UID))
}

// newContentKey returns the key with these secret bytes.
func newContentKey(raw []byte) (*contentKey, error) {
	block, err := aes.NewCipher(hmacOf(raw, "encrypt"))
	if err != nil {
		return nil, fmt.Errorf("make cipher: %w", err)
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		return nil, fmt.Errorf("make cipher: %w", err)
	}
	id := encryptionAlgorithm + hex.EncodeToString(hmacOf(raw, "id")[:8])
	return &contentKey{id: id, raw: raw, mac: hmacOf(raw, "hash"), aead: aead}, nil
}

// hmacOf returns the HMAC of the list of parts. Each part has its length as a prefix, so different lists never collide.
func hmacOf(key []byte, parts ...string) []byte {
	mac := hmac.New(sha256.New, key)
	for _, part := range parts {
		_, _ = fmt.Fprintf(mac, "%d:%s", len(part), part) // a hash returns no error
	}
	return mac.Sum(nil)
}

// encrypt returns the encrypted payload. header is authenticated, not encrypted: decrypt fails with another header.
func (k *contentKey) encrypt(header string, payload []byte) []byte {
	return k.aead.Seal(nil, nil, payload, []byte(header))
}

// decrypt is the reverse of encrypt.
func (k *contentKey) decrypt(header string, payload []byte) ([]byte, error) {
	plain, err := k.aead.Open(nil, nil, payload, []byte(header))
	if err != nil {
		return nil, fmt.Errorf("%w: decrypt: %w", ErrCorrupt, err)
	}
	return plain, nil
}

// hash returns the hash of encrypted content. plain is the hash of the unencrypted content, so each encryption of the
// same content has the same hash.
func (k *contentKey) hash(plain [sha256.Size]byte) [sha256.Size]byte {
	return [sha256.Size]byte(hmacOf(k.mac, string(plain[:])))
}

// withContentKey returns c with the key of a member, with which contentObject encrypts the payload. The result
// has another hash and name than c.
func (e *encoder) withContentKey(key *contentKey, c chunk) chunk {
	c.key, c.hash = key, key.hash(c.hash)
	c.name = e.key.contentName(c.hash[:])
	return c
}

// assignContentKey returns chunks with the key of m on the private ones. It assigns no key if the agent of m is of an
// earlier version, which cannot decrypt content.
func (t *PullTransport) assignContentKey(ctx context.Context, m fleet.Member, chunks []chunk) ([]chunk, error) {
	if !slices.ContainsFunc(chunks, func(c chunk) bool { return c.private }) {
		return chunks, nil
	}
	// The cache may not have the new Lease of an agent yet, so the Lease is read live before content is written
	// unencrypted.
	for _, reader := range []client.Reader{t.hub, t.live} {
		if canDecrypt, err := t.canDecrypt(ctx, reader, m); err != nil {
			return nil, err
		} else if !canDecrypt {
			continue
		}
		key, err := t.ensureContentKey(ctx, m)
		if err != nil {
			return nil, err
		}
		encrypted := slices.Clone(chunks)
		for i, c := range encrypted {
			if c.private {
				encrypted[i] = t.encoder.withContentKey(key, c)
			}
		}
		return encrypted, nil
	}
	return chunks, nil
}

// setEncryptionAnnotation sets annotationEncryption on group if chunks are encrypted.
func setEncryptionAnnotation(group *libv1beta1.ConfigurationGroup, chunks []chunk) {
	for _, c := range chunks {
		if c.key != nil {
			group.Annotations[annotationEncryption] = c.key.id
		}
	}
}

// canDecrypt returns whether the agent of m has announced on its Lease that it can read encrypted content.
func (t *PullTransport) canDecrypt(ctx context.Context, reader client.Reader, m fleet.Member) (bool, error) {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: m.Name}
	if err := reader.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read Lease %s: %w", key, err)
	}
	holder := lease.Spec.HolderIdentity
	return holder != nil && *holder != "" && lease.Annotations[kube.AnnotationDecrypts] == *holder, nil
}

// hasOutdatedEncryption returns whether the private content of group, which requests d, must be written again,
// encrypted or unencrypted: the agent was upgraded or downgraded since the content was written.
func (t *PullTransport) hasOutdatedEncryption(ctx context.Context, d desiredBundle, group *libv1beta1.ConfigurationGroup) (bool, error) {
	if !d.bundle.Sensitive() {
		return false, nil
	}
	canDecrypt, err := t.canDecrypt(ctx, t.hub, d.member)
	return canDecrypt == (group.Annotations[annotationEncryption] == ""), err
}

// ensureContentKey writes the key of m to its Secret, and returns it. It sends no request if this process has written
// the Secret before.
func (t *PullTransport) ensureContentKey(ctx context.Context, m fleet.Member) (*contentKey, error) {
	key, err := t.rootKey.contentKeyOf(m)
	if err != nil {
		return nil, err
	}
	name := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: fleet.ContentKeySecret(m.Name)}
	isStored := func() bool { stored, _ := t.storedKeys.Load(name); return stored == key.id }
	if isStored() {
		return key, nil
	}
	// Other deliveries may wait for this request, so it must not end with the context of this delivery.
	writeCtx := context.WithoutCancel(ctx)
	_, err, _ = t.creations.Do("key "+name.String(), func() (any, error) {
		if isStored() {
			return nil, nil //nolint:nilnil // the result is the error
		}
		if err := t.applyKeySecret(writeCtx, m, name, key); err != nil {
			return nil, err
		}
		t.storedKeys.Store(name, key.id)
		return nil, nil //nolint:nilnil // the result is the error
	})
	return key, err
}

// applyKeySecret writes the Secret with the key of m.
func (t *PullTransport) applyKeySecret(ctx context.Context, m fleet.Member, name client.ObjectKey, key *contentKey) error {
	raw, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&corev1.Secret{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: name.Namespace, Name: name.Name,
			Labels: map[string]string{libv1beta1.PullClusterNameLabel: labelValue(m.Name), labelManagedBy: managedBy},
		},
		Type: contentKeySecretType,
		Data: map[string][]byte{keyField: key.raw},
	})
	if err != nil {
		return fmt.Errorf("encode secret %s: %w", name, err)
	}
	err = t.hub.Apply(ctx, client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: raw}), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	if apierrors.IsInvalid(err) {
		// err is not wrapped: it can quote the other Secret.
		return fmt.Errorf("write the key of the content: Secret %s exists with another type than %s", name, contentKeySecretType)
	}
	if err != nil {
		return fmt.Errorf("write the key of the content to Secret %s: %w", name, err)
	}
	return nil
}

// forgetContentKey makes the next delivery to m write the Secret with the key again.
func (t *PullTransport) forgetContentKey(m fleet.Member) {
	t.storedKeys.Delete(client.ObjectKey{Namespace: m.DeliveryNamespace, Name: fleet.ContentKeySecret(m.Name)})
}

// decrypt replaces the payload of obj by the decrypted one, and returns the key. It returns nil if obj is not
// encrypted. The agent keeps the key, so it reads the Secret once, and again for content with another key. It fails
// with ErrContentMissing if the Secret does not have the key of obj: the hub then writes the Secret and the content
// again.
func (s *AgentSource) decrypt(ctx context.Context, obj *libv1beta1.ConfigurationBundle) (*contentKey, error) {
	id := obj.Annotations[annotationEncryption]
	if id == "" {
		return nil, nil //nolint:nilnil // there is no key
	}
	s.keyMu.Lock()
	defer s.keyMu.Unlock()
	if s.key == nil || s.key.id != id {
		key, err := s.readContentKey(ctx)
		if err != nil {
			return nil, err
		}
		if s.key = key; key.id != id {
			return nil, fmt.Errorf("%w: it is encrypted with a key that was replaced", ErrContentMissing)
		}
	}
	payload, err := s.key.decrypt(obj.Annotations[annotationHeader], obj.Spec.Payload)
	if err != nil {
		return nil, err
	}
	obj.Spec.Payload = payload
	return s.key, nil
}

// readContentKey reads the key of the member's content.
func (s *AgentSource) readContentKey(ctx context.Context) (*contentKey, error) {
	secret := &corev1.Secret{}
	name := client.ObjectKey{Namespace: s.namespace, Name: fleet.ContentKeySecret(s.cluster)}
	err := s.hub.Get(ctx, name, secret)
	if apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("%w: no Secret %s with its key", ErrContentMissing, name)
	}
	if err != nil {
		return nil, fmt.Errorf("read the key of the content from Secret %s: %w", name, markUnavailable(err))
	}
	return newContentKey(secret.Data[keyField])
}
