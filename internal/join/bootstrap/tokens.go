package bootstrap

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
)

// DefaultTokenLife is how long a token lives unless people say otherwise: that of the Karmada surface.
const DefaultTokenLife = 24 * time.Hour

// DefaultUsages returns what a token is for unless people say otherwise.
func DefaultUsages() []string { return []string{"signing", "authentication"} }

// TokenOptions say what a token is for.
type TokenOptions struct {
	// TTL is how long it lives; 0: without an end.
	TTL time.Duration
	// Usages are any of "signing" and "authentication". Default: both.
	Usages []string
	// Groups that its holder belongs to, each system:bootstrappers:<...>. Default: DefaultGroup.
	Groups []string
	// Description is for people.
	Description string
	// Cluster makes it a token for the Cluster of that name alone, which may have registered before. Empty: for any new
	// one.
	Cluster string
}

// writeTries and writePause say how often an API server that cannot answer now is asked to keep a token: after 5, 10,
// 20 and 40 s again.
const (
	writeTries = 5
	writePause = 5 * time.Second
)

// CreateToken makes a bootstrap token on the hub. What the options say wrong is an error before anything is written.
func CreateToken(ctx context.Context, hub client.Client, o TokenOptions) (Token, error) {
	if err := o.complete(); err != nil {
		return Token{}, err
	}
	t, err := newToken()
	if err != nil {
		return Token{}, err
	}
	t.Description, t.Usages, t.Groups = o.Description, o.Usages, o.Groups
	if o.TTL > 0 {
		t.Expires = time.Now().Add(o.TTL)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: secretPrefix + t.ID},
		Type:       corev1.SecretTypeBootstrapToken,
		Data:       t.data(),
	}
	pauses := wait.Backoff{Duration: writePause, Factor: 2, Steps: writeTries}
	var last error
	err = wait.ExponentialBackoffWithContext(ctx, pauses, func(ctx context.Context) (bool, error) {
		last = hub.Create(ctx, secret.DeepCopy(), client.FieldOwner(kube.FieldManager))
		if passing(last) {
			return false, nil
		}
		return last == nil, last
	})
	switch {
	case apierrors.IsAlreadyExists(last):
		return Token{}, fmt.Errorf("a token with id %q already exists", t.ID)
	case last != nil:
		return Token{}, fmt.Errorf("create bootstrap token: %w", last)
	case err != nil:
		return Token{}, fmt.Errorf("create bootstrap token: %w", err)
	}
	return t, nil
}

// passing says whether the API server may be able to do later what it could not do now.
func passing(err error) bool {
	return apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err)
}

// complete fills in what is missing, and says what is wrong.
func (o *TokenOptions) complete() error {
	if len(o.Usages) == 0 {
		o.Usages = DefaultUsages()
	}
	if len(o.Groups) == 0 {
		o.Groups = []string{DefaultGroup}
	}
	if o.TTL < 0 {
		return fmt.Errorf("the time to live %s is negative", o.TTL)
	}
	for _, usage := range o.Usages {
		if !slices.Contains(DefaultUsages(), usage) {
			return fmt.Errorf("invalid bootstrap token usage %q: valid usages are %s", usage, strings.Join(DefaultUsages(), ", "))
		}
	}
	if o.Cluster != "" {
		if err := karmada.ValidateName(o.Cluster); err != nil {
			return err
		}
		o.Groups = append(slices.Clone(o.Groups), clusterGroupPrefix+o.Cluster)
	}
	// What the API server does not take for a group of bootstrap tokens would make the whole token worthless.
	const form = `system:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]`
	for _, group := range o.Groups {
		if !regexp.MustCompile(`^` + form + `$`).MatchString(group) {
			return fmt.Errorf("bootstrap group %q is invalid (must match %s)", group, form)
		}
	}
	return nil
}

// ListTokens reads the bootstrap tokens of the hub, sorted by id. hub must read from the API server. Secrets that are
// no token are told to warn and left out.
func ListTokens(ctx context.Context, hub client.Reader, warn func(string)) ([]Token, error) {
	var secrets corev1.SecretList
	err := hub.List(ctx, &secrets, client.InNamespace(metav1.NamespaceSystem), client.MatchingFields{"type": string(corev1.SecretTypeBootstrapToken)})
	if err != nil {
		return nil, fmt.Errorf("list bootstrap tokens: %w", err)
	}
	var tokens []Token
	for i := range secrets.Items {
		t, err := ReadToken(&secrets.Items[i])
		if err != nil {
			warn(err.Error())
			continue
		}
		tokens = append(tokens, t)
	}
	slices.SortFunc(tokens, func(a, b Token) int { return strings.Compare(a.ID, b.ID) })
	return tokens, nil
}

// DeleteToken deletes the bootstrap token that idOrToken names, by its id alone or whole, and returns its id.
func DeleteToken(ctx context.Context, hub client.Client, idOrToken string) (id string, err error) {
	if !regexp.MustCompile(`^` + tokenIDPattern + `(\.[a-z0-9]{16})?$`).MatchString(idOrToken) {
		return "", fmt.Errorf("the given token is neither of the form %q nor of the form %q", tokenIDPattern, tokenPattern)
	}
	id, _, _ = strings.Cut(idOrToken, ".")
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: secretPrefix + id}}
	if err := hub.Delete(ctx, secret); err != nil {
		return id, fmt.Errorf("delete bootstrap token %q: %w", id, err)
	}
	return id, nil
}

// TokenSecret returns the key of the Secret that the token with this id is in.
func TokenSecret(id string) client.ObjectKey {
	return client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: secretPrefix + id}
}
