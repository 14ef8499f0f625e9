package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// The names of what a registration's manifest makes on a member. They are fixed by the Sveltos surface.
const (
	agentAccount     = "sveltos-applier-manager" // of the Deployment, too
	agentRole        = "sveltos-applier-manager-role"
	agentRoleBinding = "sveltos-applier-manager-rolebinding"
	agentService     = "sveltos-applier-metrics-service"
	agentLabel       = "app.kubernetes.io/name"
	agentLabelValue  = "sveltos-applier"
	secretFlag       = "--secret-with-kubeconfig="
)

// departingAnnotation on the kubeconfig Secret says that the hub ordered the agent to remove itself, and that
// everything is prepared.
const departingAnnotation = "towline.dev/departing"

// Errors that end a session for good, or for a departure.
var (
	errOrdered  = errors.New("the hub orders the agent to remove itself")
	errDeparted = errors.New("the agent has removed itself")
)

// mark is the value of departingAnnotation, in JSON.
type mark struct {
	// Cluster is the uid of the cluster object that was deleted, with the order on it.
	Cluster types.UID `json:"cluster"`
	// Credential is a hash of what the Secret held then. A Secret that holds something else by now is of a later
	// registration, which nobody asked to remove.
	Credential string `json:"credential"`
	// Since is when the order was taken.
	Since time.Time `json:"since"`
}

// departure removes the agent from its member. The agent's objects are handed over first, as dependents of the
// ClusterRole, which is then deleted.
type departure struct {
	*session.OwnerClient
	member kubernetes.Interface
	secret string
	clock  clock.PassiveClock
}

func newDeparture(member *rest.Config, opts Options) (*departure, error) {
	clientset, err := kubernetes.NewForConfig(member)
	if err != nil {
		return nil, fmt.Errorf("make client for the member: %w", err)
	}
	handover, err := session.NewOwnerClient(member, "ClusterRole", agentRole)
	if err != nil {
		return nil, err
	}
	return &departure{OwnerClient: handover, member: clientset, secret: opts.KubeconfigSecret, clock: opts.Clock}, nil
}

// dependents are the manifest's objects that go with the ClusterRole; Namespace and Secret are treated apart.
func dependents() []session.Object {
	return []session.Object{
		session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", agentRoleBinding),
		session.NewObject(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), kube.AgentNamespace, agentAccount),
		session.NewObject(corev1.SchemeGroupVersion.WithResource("services"), kube.AgentNamespace, agentService),
		session.NewObject(schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, kube.AgentNamespace, agentAccount),
	}
}

func agentNamespace() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("namespaces"), "", kube.AgentNamespace)
}

func (d *departure) secretObject() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("secrets"), kube.AgentNamespace, d.secret)
}

// marked returns the mark of a departure that was begun, nil if there is none.
func (d *departure) marked(ctx context.Context) (*mark, error) {
	secret, err := d.member.CoreV1().Secrets(kube.AgentNamespace).Get(ctx, d.secret, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // none is an answer
	}
	if err != nil {
		return nil, fmt.Errorf("read Secret %s/%s with the way to the hub: %w", kube.AgentNamespace, d.secret, err)
	}
	text, found := secret.Annotations[departingAnnotation]
	if !found {
		return nil, nil //nolint:nilnil // none is an answer
	}
	m := &mark{}
	if json.Unmarshal([]byte(text), m) == nil && m.Credential == session.Fingerprint(secret) {
		return m, nil
	}
	log.FromContext(ctx).Info("the cluster was registered again while its agent was leaving: the agent stays")
	return nil, d.stay(ctx)
}

// prepare hands the agent's objects to the garbage collector and then marks the Secret. Nothing is removed by it.
func (d *departure) prepare(ctx context.Context, cluster types.UID) (*mark, error) {
	shared, err := d.servesAnother(ctx)
	if err != nil {
		return nil, err
	}
	var owner *metav1.OwnerReference
	if !shared {
		if owner, err = d.handOver(ctx); err != nil {
			return nil, err
		}
	}
	secrets := d.member.CoreV1().Secrets(kube.AgentNamespace)
	m := &mark{Cluster: cluster, Since: d.clock.Now().UTC()}
	err = kube.OnConflict(ctx, func() error {
		secret, err := secrets.Get(ctx, d.secret, metav1.GetOptions{})
		if err != nil {
			return err
		}
		m.Credential = session.Fingerprint(secret)
		value, err := json.Marshal(m)
		if err != nil {
			return err
		}
		return d.Patch(ctx, d.secretObject(), map[string]any{
			"resourceVersion": secret.ResourceVersion, "ownerReferences": d.WithOwner(secret.OwnerReferences, owner),
			"annotations": map[string]any{departingAnnotation: string(value)},
		})
	})
	if err != nil {
		return nil, fmt.Errorf("mark Secret %s/%s: %w", kube.AgentNamespace, d.secret, err)
	}
	return m, nil
}

// handOver makes the agent's objects dependents of the ClusterRole.
func (d *departure) handOver(ctx context.Context) (*metav1.OwnerReference, error) {
	owner, err := d.owner(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range dependents() {
		if err := d.SetOwner(ctx, o, owner); err != nil {
			return nil, err
		}
	}
	return owner, d.decideNamespace(ctx, owner)
}

// owner returns the reference to the ClusterRole. An agent that runs outside its cluster may have none, and makes one
// that permits nothing.
func (d *departure) owner(ctx context.Context) (*metav1.OwnerReference, error) {
	roles := d.member.RbacV1().ClusterRoles()
	role, err := roles.Get(ctx, agentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		role, err = roles.Create(ctx, &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: agentRole, Labels: map[string]string{agentLabel: agentLabelValue}},
		}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return nil, fmt.Errorf("read ClusterRole %s: %w", agentRole, err)
	}
	return &metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: agentRole, UID: role.UID}, nil
}

// remove removes the agent. It returns errDeparted when that is certain to happen.
func (d *departure) remove(ctx context.Context) error {
	shared, err := d.servesAnother(ctx)
	if err != nil {
		return err
	}
	background := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
	if shared {
		err := d.member.CoreV1().Secrets(kube.AgentNamespace).Delete(ctx, d.secret, background)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete Secret %s/%s: %w", kube.AgentNamespace, d.secret, err)
		}
		return errDeparted
	}
	_, err = d.member.RbacV1().ClusterRoles().Get(ctx, agentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return errDeparted
	}
	if err != nil {
		return fmt.Errorf("read ClusterRole %s: %w", agentRole, err)
	}
	// Again: since it was prepared the namespace may have got something else to hold, and the ClusterRole may have been
	// made anew.
	owner, err := d.handOver(ctx)
	if err != nil {
		return err
	}
	if err := d.SetOwner(ctx, d.secretObject(), owner); err != nil {
		return err
	}
	background.Preconditions = metav1.NewUIDPreconditions(string(owner.UID))
	err = d.member.RbacV1().ClusterRoles().Delete(ctx, agentRole, background)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete ClusterRole %s: %w", agentRole, err)
	}
	return errDeparted
}

// stay takes back what prepare did.
func (d *departure) stay(ctx context.Context) error {
	for _, o := range append(dependents(), agentNamespace(), d.secretObject()) {
		if err := d.SetOwner(ctx, o, nil); err != nil {
			return err
		}
	}
	return d.Patch(ctx, d.secretObject(), map[string]any{"annotations": map[string]any{departingAnnotation: nil}})
}

// servesAnother says whether the agent that runs in the cluster is that of another one, whose manifest was applied over
// this one's: then nothing but the Secret is this agent's own.
func (d *departure) servesAnother(ctx context.Context) (bool, error) {
	deployment, err := d.member.AppsV1().Deployments(kube.AgentNamespace).Get(ctx, agentAccount, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the agent's Deployment: %w", err)
	}
	for _, container := range deployment.Spec.Template.Spec.Containers {
		for _, arg := range container.Args {
			if secret, found := strings.CutPrefix(arg, secretFlag); found && secret != d.secret {
				return true, nil
			}
		}
	}
	return false, nil
}
