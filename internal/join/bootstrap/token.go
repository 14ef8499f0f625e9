package bootstrap

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	tokenapi "k8s.io/cluster-bootstrap/token/api"
	tokenutil "k8s.io/cluster-bootstrap/token/util"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// Token is one bootstrap token.
type Token struct {
	// ID is public. Secret permits to register a cluster.
	ID, Secret string
	// Description is for people.
	Description string
	// Expires is the time of expiry; zero for a token that does not expire.
	Expires time.Time
	// Usages are "signing" and "authentication", or one of them, sorted.
	Usages []string
	// Groups are the groups of the holder, without the group of all bootstrap tokens.
	Groups []string
}

// ParseToken parses <id>.<secret>. Its error does not contain the token.
func ParseToken(text string) (Token, error) {
	if !tokenutil.IsValidBootstrapToken(text) {
		return Token{}, fmt.Errorf("the token is not of the form %q", tokenapi.BootstrapTokenPattern)
	}
	id, secret, _ := strings.Cut(text, ".")
	return Token{ID: id, Secret: secret}, nil
}

// String returns <id>.<secret>, the input of ParseToken.
func (t Token) String() string { return t.ID + "." + t.Secret }

// signature returns the detached JWS of content, signed with the secret of the token, as the signer of Kubernetes
// computes it. verifySignature compares it with the received signature, and so never uses the algorithm in that.
func (t Token) signature(content string) string {
	encode := base64.RawURLEncoding.EncodeToString
	head := encode([]byte(`{"alg":"HS256","kid":"` + t.ID + `"}`))
	mac := hmac.New(sha256.New, []byte(t.Secret))
	// Writing to a hash never fails.
	_, _ = mac.Write([]byte(head + "." + encode([]byte(content))))
	return head + ".." + encode(mac.Sum(nil))
}

// secretData is the inverse of ReadToken.
func (t Token) secretData() map[string][]byte {
	data := map[string][]byte{tokenapi.BootstrapTokenIDKey: []byte(t.ID), tokenapi.BootstrapTokenSecretKey: []byte(t.Secret)}
	if t.Description != "" {
		data[tokenapi.BootstrapTokenDescriptionKey] = []byte(t.Description)
	}
	if !t.Expires.IsZero() {
		data[tokenapi.BootstrapTokenExpirationKey] = []byte(t.Expires.UTC().Format(time.RFC3339))
	}
	for _, usage := range t.Usages {
		data[tokenapi.BootstrapTokenUsagePrefix+usage] = []byte("true")
	}
	if len(t.Groups) > 0 {
		data[tokenapi.BootstrapTokenExtraGroupsKey] = []byte(strings.Join(t.Groups, ","))
	}
	return data
}

// ReadToken returns the token in a Secret.
func ReadToken(secret *corev1.Secret) (Token, error) {
	t, err := ParseToken(string(secret.Data[tokenapi.BootstrapTokenIDKey]) + "." + string(secret.Data[tokenapi.BootstrapTokenSecretKey]))
	if err != nil {
		return Token{}, fmt.Errorf("bootstrap token has no valid %s or %s in secret: %s", tokenapi.BootstrapTokenIDKey, tokenapi.BootstrapTokenSecretKey, secret.Name)
	}
	if secret.Name != tokenutil.BootstrapTokenSecretName(t.ID) {
		return Token{}, fmt.Errorf("bootstrap token name is not of the form %q: %s", tokenapi.BootstrapTokenSecretPrefix+"<"+tokenapi.BootstrapTokenIDKey+">", secret.Name)
	}
	if text := string(secret.Data[tokenapi.BootstrapTokenExpirationKey]); text != "" {
		if t.Expires, err = time.Parse(time.RFC3339, text); err != nil {
			return Token{}, fmt.Errorf("can't parse expiration time of bootstrap token %q: %w", t.ID, err)
		}
	}
	t.Description = string(secret.Data[tokenapi.BootstrapTokenDescriptionKey])
	for key, value := range secret.Data {
		if usage, ok := strings.CutPrefix(key, tokenapi.BootstrapTokenUsagePrefix); ok && string(value) == "true" {
			t.Usages = append(t.Usages, usage)
		}
	}
	slices.Sort(t.Usages)
	if groups := string(secret.Data[tokenapi.BootstrapTokenExtraGroupsKey]); groups != "" {
		t.Groups = strings.Split(groups, ",")
	}
	return t, nil
}

// CheckUsable returns an error if the token cannot be used for a registration at the time now.
func (t Token) CheckUsable(now time.Time) error {
	if !t.Expires.IsZero() && !now.Before(t.Expires) {
		return errors.New("the bootstrap token has expired")
	}
	if !slices.Contains(t.Usages, "authentication") {
		return errors.New("the bootstrap token is not for authentication")
	}
	return nil
}

// DefaultTokenTTL is the default lifetime of a token, as in Karmada.
const DefaultTokenTTL = 24 * time.Hour

// TokenOptions are options for CreateToken.
type TokenOptions struct {
	// TTL is the lifetime of the token; 0 for a token that does not expire.
	TTL time.Duration
	// Usages are "signing" and "authentication", or one of them. Default: both.
	Usages []string
	// Groups are the groups of the holder, each system:bootstrappers:<...>. Default: DefaultTokenGroup.
	Groups []string
	// Description is for people.
	Description string
	// Cluster binds the token to the Cluster with this name, whether that exists or not. If it is "", the token can
	// register any new Cluster.
	Cluster string
}

// CreateToken creates a bootstrap token on the hub. It retries temporary errors for about 75 s.
func CreateToken(ctx context.Context, hub client.Client, o TokenOptions) (Token, error) {
	if err := o.setDefaultsAndValidate(); err != nil {
		return Token{}, err
	}
	text, err := tokenutil.GenerateBootstrapToken()
	if err != nil {
		return Token{}, fmt.Errorf("create bootstrap token: %w", err)
	}
	t, err := ParseToken(text)
	if err != nil {
		return Token{}, err
	}
	t.Description, t.Usages, t.Groups = o.Description, o.Usages, o.Groups
	if o.TTL > 0 {
		t.Expires = time.Now().Add(o.TTL)
	}
	secret := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: tokenutil.BootstrapTokenSecretName(t.ID)},
		Type:       corev1.SecretTypeBootstrapToken,
		Data:       t.secretData(),
	}
	// The pauses are 5, 10, 20 and 40 s.
	backoff := wait.Backoff{Duration: 5 * time.Second, Factor: 2, Steps: 5}
	err = kube.RetryOnWithBackoff(ctx, backoff, isTemporary, func() error {
		return hub.Create(ctx, secret.DeepCopy(), client.FieldOwner(kube.FieldManager))
	})
	if apierrors.IsAlreadyExists(err) {
		return Token{}, fmt.Errorf("a token with id %q already exists", t.ID)
	}
	if err != nil {
		return Token{}, fmt.Errorf("create bootstrap token: %w", err)
	}
	return t, nil
}

// isTemporary returns whether the API server may accept the same request later.
func isTemporary(err error) bool {
	return apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err)
}

// setDefaultsAndValidate sets the defaults, adds the group of o.Cluster, and returns an error for invalid options.
func (o *TokenOptions) setDefaultsAndValidate() error {
	if len(o.Usages) == 0 {
		o.Usages = tokenapi.KnownTokenUsages
	}
	if len(o.Groups) == 0 {
		o.Groups = []string{DefaultTokenGroup}
	}
	if err := tokenutil.ValidateUsages(o.Usages); err != nil {
		return err
	}
	if o.Cluster != "" {
		o.Groups = append(slices.Clone(o.Groups), clusterGroupPrefix+o.Cluster)
	}
	for _, group := range o.Groups {
		if err := tokenutil.ValidateBootstrapGroupName(group); err != nil {
			return err
		}
	}
	return nil
}

// ListTokens returns the bootstrap tokens of the hub, sorted by id. It calls warn for each invalid Secret. hub must
// read from the API server.
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

// DeleteToken deletes the bootstrap token with the given id or <id>.<secret>, and returns its id.
func DeleteToken(ctx context.Context, hub client.Client, idOrToken string) (id string, err error) {
	if !tokenutil.IsValidBootstrapTokenID(idOrToken) && !tokenutil.IsValidBootstrapToken(idOrToken) {
		return "", fmt.Errorf("the given token is neither of the form %q nor of the form %q", tokenapi.BootstrapTokenIDPattern, tokenapi.BootstrapTokenPattern)
	}
	id, _, _ = strings.Cut(idOrToken, ".")
	key := TokenSecret(id)
	secret := &corev1.Secret{ObjectMeta: objectMeta(key.Namespace, key.Name)}
	if err := hub.Delete(ctx, secret); err != nil {
		return id, fmt.Errorf("delete bootstrap token %q: %w", id, err)
	}
	return id, nil
}

// TokenSecret returns the key of the Secret of the token with this id.
func TokenSecret(id string) client.ObjectKey {
	return client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: tokenutil.BootstrapTokenSecretName(id)}
}
