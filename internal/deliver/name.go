package deliver

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

const (
	// rootKeySecret is the Secret in kube.AgentNamespace of the hub that holds the HMAC key of the names of content.
	rootKeySecret = "towline-bundle-key"
	keyField      = "key"
	// namePrefix and nameLength give groups and content names of the same form as in Sveltos.
	namePrefix = "config-"
	nameLength = 20
)

// Key is the HMAC key of the names of ConfigurationBundles. Without it nobody can compute the name of known content, to
// test whether the hub stores it. The contentKeys of members and the key of ForStatus are derived from it.
type Key []byte

// LoadOrCreateKey returns the hub's key, and creates it on first use. hub must read from the API server, not from a
// cache, and its namespace kube.AgentNamespace must exist. Several processes may call it concurrently: all get the same
// key.
func LoadOrCreateKey(ctx context.Context, hub client.Client) (Key, error) {
	secret := &corev1.Secret{}
	name := client.ObjectKey{Namespace: kube.AgentNamespace, Name: rootKeySecret}
	err := hub.Get(ctx, name, secret)
	if apierrors.IsNotFound(err) {
		if err = createKey(ctx, hub, name); err == nil || apierrors.IsAlreadyExists(err) {
			err = hub.Get(ctx, name, secret)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("load bundle key from secret %s: %w", name, err)
	}
	key := secret.Data[keyField]
	if len(key) < sha256.Size {
		return nil, fmt.Errorf("load bundle key from secret %s: field %q has %d bytes, want %d", name, keyField, len(key), sha256.Size)
	}
	return key, nil
}

func createKey(ctx context.Context, hub client.Client, name client.ObjectKey) error {
	key := make([]byte, sha256.Size)
	// rand.Read never returns an error.
	_, _ = rand.Read(key)
	immutable := true
	return hub.Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Data:       map[string][]byte{keyField: key},
		Immutable:  &immutable,
	})
}

// forShard returns the key of a shard. Shards have different keys, so that they never share content.
func (k Key) forShard(shard fleet.Shard) Key {
	if shard.IsDefault() {
		return k
	}
	mac := hmac.New(sha256.New, k)
	_, _ = mac.Write([]byte("shard\x00" + shard))
	return mac.Sum(nil)
}

// ForStatus returns the HMAC key of the hashes in the status of ClusterSummaries. All shards have the same, so that the
// hashes stay when a cluster moves to another shard.
func (k Key) ForStatus() []byte { return hmacOf(k, "status") }

// contentName returns the name of the ConfigurationBundle with this canonical content.
func (k Key) contentName(content []byte) string {
	mac := hmac.New(sha256.New, k)
	_, _ = mac.Write(content)
	return nameFromHash(mac.Sum(nil))
}

// GroupName returns the name of the one ConfigurationGroup of id on m, in m.DeliveryNamespace.
func GroupName(m fleet.Member, id bundle.ID) string {
	tuple := strings.Join([]string{m.DeliveryNamespace, m.Name, id.RequestorKind, id.Feature, id.RequestorName}, "\x00")
	sum := sha256.Sum256([]byte(tuple))
	return nameFromHash(sum[:])
}

// nameFromHash returns a name with the first nameLength base32 digits of sum.
func nameFromHash(sum []byte) string {
	text := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(sum)
	return namePrefix + strings.ToLower(text[:nameLength])
}

// labelValue returns name, or a name made of its hash if name is too long for the value of a label.
func labelValue(name string) string {
	if len(name) <= validation.LabelValueMaxLength {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	return nameFromHash(sum[:])
}
