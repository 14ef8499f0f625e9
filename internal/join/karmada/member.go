package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

const (
	// accountPrefix begins the name of the hub's ServiceAccount on a cluster, rolePrefix that of its ClusterRole.
	accountPrefix = "karmada-"
	rolePrefix    = "karmada-controller-manager:"
	// impersonator is the ServiceAccount with which hubs impersonate their users.
	impersonator = "karmada-impersonator"
	// userAnnotationPrefix is the prefix of annotation keys on shared objects. There is one annotation for each cluster of
	// each hub that uses the object.
	userAnnotationPrefix = "hub.towline.dev/"
	// maxAnnotationName is the maximum length of an annotation key after its domain.
	maxAnnotationName = 63
	// tokenTimeout limits the wait for the member's token controller, as in Karmada.
	tokenTimeout = 30 * time.Second
	// pollInterval is the interval between two reads of an object that is awaited.
	pollInterval = 100 * time.Millisecond
)

// memberRegistration reads and writes the objects that the registration of a cluster has on the cluster. Own objects
// belong to one cluster of one hub. Shared objects (the namespace, and the impersonator with its token) may be used by
// several.
type memberRegistration struct {
	client                    client.Client
	resources                 foreign.Resources
	cluster, namespace, hubID string
	// runKey identifies the run that writes the objects: <UID of the Cluster>/<attempt>. A run that resumes the Cluster
	// keeps the UID.
	runKey string
	// removedRunPrefix limits a rollback to objects whose runKey begins with it. Empty means all objects.
	removedRunPrefix string
}

func newMemberObjects(config *rest.Config, cluster, namespace, hubID string) (*memberRegistration, error) {
	memberClient, resources, err := newClients(config)
	if err != nil {
		return nil, fmt.Errorf("connect to the cluster: %w", err)
	}
	return &memberRegistration{client: memberClient, resources: resources, cluster: cluster, namespace: namespace, hubID: hubID}, nil
}

// newClients returns clients with a request timeout, for a small number of requests.
func newClients(config *rest.Config) (client.Client, *discovery.DiscoveryClient, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = requestQPS, requestQPS
	if config.Timeout == 0 {
		config.Timeout = requestTimeout
	}
	c, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, nil, err
	}
	resources, err := discovery.NewDiscoveryClientForConfig(config)
	return c, resources, err
}

func (m *memberRegistration) account() string { return accountPrefix + m.cluster }
func (m *memberRegistration) role() string    { return rolePrefix + m.account() }

// usedByAnnotation returns the key of this cluster's annotation on shared objects.
func (m *memberRegistration) usedByAnnotation() string {
	const prefix = 20
	name := m.hubID + "." + m.cluster
	if len(name) > maxAnnotationName {
		sum := sha256.Sum256([]byte(name))
		name = name[:prefix] + "." + hex.EncodeToString(sum[:prefix])
	}
	return userAnnotationPrefix + name
}

// own returns the desired own objects, the Secret for the account's token last.
func (m *memberRegistration) own() []client.Object {
	meta := func(namespace, name string) metav1.ObjectMeta {
		meta := systemMeta(namespace, name)
		meta.Annotations = map[string]string{kube.AnnotationHub: m.hubID, attemptAnnotation: m.runKey}
		return meta
	}
	all := []string{rbacv1.APIGroupAll}
	return []client.Object{
		&corev1.ServiceAccount{ObjectMeta: meta(m.namespace, m.account())},
		&rbacv1.ClusterRole{ObjectMeta: meta("", m.role()), Rules: []rbacv1.PolicyRule{
			{APIGroups: all, Resources: all, Verbs: all}, {NonResourceURLs: all, Verbs: []string{"get"}},
		}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: meta("", m.role()),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: m.role()},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: m.namespace, Name: m.account()}},
		},
		tokenSecret(meta(m.namespace, m.account())),
	}
}

// shared returns the desired shared objects in the order of their creation: the namespace, the ServiceAccount of the
// impersonator, and the Secret for its token.
func (m *memberRegistration) shared() []client.Object {
	meta := func(namespace, name string) metav1.ObjectMeta {
		meta := systemMeta(namespace, name)
		meta.Annotations = map[string]string{m.usedByAnnotation(): m.runKey}
		return meta
	}
	return []client.Object{
		&corev1.Namespace{ObjectMeta: meta("", m.namespace)},
		&corev1.ServiceAccount{ObjectMeta: meta(m.namespace, impersonator)},
		tokenSecret(meta(m.namespace, impersonator)),
	}
}

// systemMeta returns the metadata of an object that a registration creates.
func systemMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"}}
}

// tokenSecret returns the Secret for the token of the ServiceAccount with the same name.
func tokenSecret(meta metav1.ObjectMeta) *corev1.Secret {
	metav1.SetMetaDataAnnotation(&meta, corev1.ServiceAccountNameKey, meta.Name)
	return &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretTypeServiceAccountToken}
}

// isOwn returns whether a registration by this hub created live.
func (m *memberRegistration) isOwn(live client.Object) bool {
	return live.GetLabels()[clusterv1alpha1.SystemLabel] == "true" && live.GetAnnotations()[kube.AnnotationHub] == m.hubID
}

// isRemovable returns whether live is an own object that this removal deletes.
func (m *memberRegistration) isRemovable(live client.Object) bool {
	return m.isOwn(live) && strings.HasPrefix(live.GetAnnotations()[attemptAnnotation], m.removedRunPrefix)
}

// isRemovableUser returns whether this removal removes the cluster's annotation from the shared object live.
func (m *memberRegistration) isRemovableUser(live client.Object) bool {
	writer, isUser := live.GetAnnotations()[m.usedByAnnotation()]
	return isUser && strings.HasPrefix(writer, m.removedRunPrefix)
}

// isShared returns whether registrations created live and use it.
func isShared(live client.Object) bool {
	return live.GetLabels()[clusterv1alpha1.SystemLabel] == "true" && len(usedByAnnotations(live)) > 0
}

// usedByAnnotations returns the keys of the annotations of live that begin with userAnnotationPrefix.
func usedByAnnotations(live client.Object) []string {
	var users []string
	for key := range live.GetAnnotations() {
		if strings.HasPrefix(key, userAnnotationPrefix) {
			users = append(users, key)
		}
	}
	return users
}

// validate returns an error if another hub has a cluster with this name on the member.
func (m *memberRegistration) validate(ctx context.Context) error {
	for _, obj := range m.own() {
		live, found, err := m.get(ctx, obj)
		if err != nil {
			return err
		}
		if found {
			if err := m.checkHub(live); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *memberRegistration) checkHub(live client.Object) error {
	if hub := live.GetAnnotations()[kube.AnnotationHub]; hub != "" && hub != m.hubID {
		return fmt.Errorf("%s on the cluster: it was joined to another hub as %s; choose another name", m.ref(live), m.cluster)
	}
	return nil
}

// get reads the object with the kind and the name of obj.
func (m *memberRegistration) get(ctx context.Context, obj client.Object) (live client.Object, found bool, err error) {
	live = obj.DeepCopyObject().(client.Object)
	if err := m.client.Get(ctx, client.ObjectKeyFromObject(obj), live); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, false, nil
		}
		return nil, false, fmt.Errorf("read %s on the cluster: %w", m.ref(obj), err)
	}
	return live, true, nil
}

func (m *memberRegistration) ref(obj client.Object) kube.Ref {
	ref := kube.Ref{Namespace: obj.GetNamespace(), Name: obj.GetName()}
	// Every kind here is in the scheme.
	if gvk, err := apiutil.GVKForObject(obj, m.client.Scheme()); err == nil {
		ref.Group, ref.Version, ref.Kind = gvk.Group, gvk.Version, gvk.Kind
	}
	return ref
}

// credential is the content of a token Secret on the member.
type credential struct{ token, authority []byte }

// ensure creates or updates all objects. It returns the credentials of the hub's account and of the impersonator.
func (m *memberRegistration) ensure(ctx context.Context) (account, impersonation credential, err error) {
	own, shared := m.own(), m.shared()
	for _, obj := range append(shared, own...) {
		if err := m.ensureObject(ctx, obj); err != nil {
			return account, impersonation, err
		}
	}
	impersonation, err = m.awaitToken(ctx, shared[2])
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret for impersonation from cluster(%s), error: %w", m.cluster, err)
	}
	account, err = m.awaitToken(ctx, own[3])
	if err != nil {
		return account, impersonation, fmt.Errorf("failed to get serviceAccount secret from cluster(%s), error: %w", m.cluster, err)
	}
	return account, impersonation, nil
}

// ensureObject creates desired, or updates it if a registration created it. It never changes a foreign object with the
// same name. If the object is being deleted, it waits for the end of the deletion and creates the object again.
func (m *memberRegistration) ensureObject(ctx context.Context, desired client.Object) error {
	err := retryStale(ctx, func() error {
		live, found, err := m.get(ctx, desired)
		if err != nil {
			return err
		}
		if !found {
			return m.client.Create(ctx, desired.DeepCopyObject().(client.Object), client.FieldOwner(kube.FieldManager))
		}
		if !live.GetDeletionTimestamp().IsZero() {
			return m.awaitDeletion(ctx, live)
		}
		created := isShared(live)
		if desired.GetAnnotations()[kube.AnnotationHub] != "" {
			if err := m.checkHub(live); err != nil {
				return err
			}
			created = m.isOwn(live)
		}
		if !created {
			return nil
		}
		copyDesired(live, desired)
		return m.client.Update(ctx, live, client.FieldOwner(kube.FieldManager))
	})
	if err != nil {
		return fmt.Errorf("write %s on the cluster: %w", m.ref(desired), err)
	}
	return nil
}

// copyDesired copies the annotations, the rules and the subjects of desired to live. It clears the owner references, so
// that a concurrent removal, which has set them, gets a conflict when it deletes its objects.
func copyDesired(live, desired client.Object) {
	annotations := maps.Clone(live.GetAnnotations())
	maps.Copy(annotations, desired.GetAnnotations())
	live.SetAnnotations(annotations)
	live.SetOwnerReferences(nil)
	switch live := live.(type) {
	case *rbacv1.ClusterRole:
		live.Rules = desired.(*rbacv1.ClusterRole).Rules
	case *rbacv1.ClusterRoleBinding:
		live.Subjects = desired.(*rbacv1.ClusterRoleBinding).Subjects
	}
}

// awaitDeletion waits for the end of the deletion of live. It always returns an error: NotFound after the deletion, so
// that retryStale tries again.
func (m *memberRegistration) awaitDeletion(ctx context.Context, live client.Object) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, deletionTimeout, true, func(context.Context) (bool, error) {
		now, found, err := m.get(ctx, live)
		return !found || err == nil && now.GetUID() != live.GetUID(), err
	})
	if err != nil {
		return fmt.Errorf("it is being deleted: %w", err)
	}
	return apierrors.NewNotFound(corev1.Resource("objects"), live.GetName())
}

// awaitToken waits until a Secret contains a token. It creates the Secret again if the member's token controller
// deletes it, because it was for an earlier ServiceAccount.
func (m *memberRegistration) awaitToken(ctx context.Context, secret client.Object) (credential, error) {
	var got credential
	err := wait.PollUntilContextTimeout(ctx, pollInterval, tokenTimeout, true, func(context.Context) (bool, error) {
		live, found, err := m.get(ctx, secret)
		if err != nil {
			return false, err
		}
		if !found {
			return false, m.ensureObject(ctx, secret)
		}
		data := live.(*corev1.Secret).Data
		got = credential{token: data[corev1.ServiceAccountTokenKey], authority: data[corev1.ServiceAccountRootCAKey]}
		return len(got.token) > 0, nil
	})
	if err != nil {
		return credential{}, fmt.Errorf("failed to get serviceAccount secret, error: %w", err)
	}
	return got, nil
}
