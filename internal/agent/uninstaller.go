package agent

import (
	"context"
	"fmt"
	"strings"

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
	"github.com/towline/towline/internal/kube/logkeys"
)

// The names in a registration's manifest. They are the names that Sveltos uses.
const (
	agentName        = "sveltos-applier-manager" // of the ServiceAccount and the Deployment
	agentRole        = "sveltos-applier-manager-role"
	agentRoleBinding = "sveltos-applier-manager-rolebinding"
	agentService     = "sveltos-applier-metrics-service"
	agentLabel       = "app.kubernetes.io/name"
	agentLabelValue  = "sveltos-applier"
	secretFlag       = "--secret-with-kubeconfig="
)

// uninstaller removes the agent from its member. It first makes the agent's objects dependents of the ClusterRole. The
// garbage collector then deletes them with the ClusterRole, even if the agent has ended or has no permissions any more.
type uninstaller struct {
	*session.OwnerClient
	member     kubernetes.Interface
	secretName string
	clock      clock.PassiveClock
}

func newUninstaller(member *rest.Config, opts Options) (*uninstaller, error) {
	clientset, err := kubernetes.NewForConfig(member)
	if err != nil {
		return nil, fmt.Errorf("create a client for the member: %w", err)
	}
	ownerClient, err := session.NewOwnerClient(member, "ClusterRole", agentRole)
	if err != nil {
		return nil, err
	}
	return &uninstaller{OwnerClient: ownerClient, member: clientset, secretName: opts.KubeconfigSecret, clock: opts.Clock}, nil
}

// dependents are the manifest's objects that become dependents of the ClusterRole, without the Namespace and the
// Secret.
func dependents() []session.ObjectRef {
	return []session.ObjectRef{
		session.NewObjectRef(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", agentRoleBinding),
		session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), kube.AgentNamespace, agentName),
		session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("services"), kube.AgentNamespace, agentService),
		session.NewObjectRef(schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, kube.AgentNamespace, agentName),
	}
}

func agentNamespace() session.ObjectRef {
	return session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("namespaces"), "", kube.AgentNamespace)
}

func (u *uninstaller) secretObject() session.ObjectRef {
	return session.NewObjectRef(corev1.SchemeGroupVersion.WithResource("secrets"), kube.AgentNamespace, u.secretName)
}

// resumeOrRollBack returns the state of an uninstallation that has begun, nil if none has. If the state has another
// credential, it is from an earlier registration: then resumeOrRollBack rolls the uninstallation back.
func (u *uninstaller) resumeOrRollBack(ctx context.Context) (*session.UninstallState, error) {
	secret, err := u.member.CoreV1().Secrets(kube.AgentNamespace).Get(ctx, u.secretName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // nil means no uninstallation
	}
	if err != nil {
		return nil, fmt.Errorf("read Secret %s/%s with the hub's kubeconfig: %w", kube.AgentNamespace, u.secretName, err)
	}
	if !session.HasUninstallState(secret) {
		return nil, nil //nolint:nilnil // nil means no uninstallation
	}
	if state := session.ParseUninstallState(ctx, secret, session.HashCredential(secret)); state != nil {
		return state, nil
	}
	return nil, u.rollBack(ctx)
}

// prepare makes the agent's objects dependents of the ClusterRole, unless the Deployment runs the agent of another
// registration. Then it writes the UninstallState. It deletes nothing.
func (u *uninstaller) prepare(ctx context.Context, cluster types.UID) (*session.UninstallState, error) {
	isReplaced, err := u.runsOtherRegistration(ctx)
	if err != nil {
		return nil, err
	}
	var owner *metav1.OwnerReference
	if !isReplaced {
		if owner, err = u.setOwners(ctx); err != nil {
			return nil, err
		}
	}
	secrets := u.member.CoreV1().Secrets(kube.AgentNamespace)
	state := &session.UninstallState{ClusterUID: cluster, Since: u.clock.Now().UTC()}
	err = kube.RetryOnConflict(ctx, func() error {
		secret, err := secrets.Get(ctx, u.secretName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		state.CredentialHash = session.HashCredential(secret)
		return u.WriteUninstallState(ctx, u.secretObject(), state, map[string]any{
			"resourceVersion": secret.ResourceVersion, "ownerReferences": u.WithOwner(secret.OwnerReferences, owner),
		})
	})
	if err != nil {
		return nil, fmt.Errorf("record the uninstallation in Secret %s/%s: %w", kube.AgentNamespace, u.secretName, err)
	}
	return state, nil
}

// setOwners makes the agent's objects, except the Secret, dependents of the ClusterRole. It returns the reference to
// the ClusterRole.
func (u *uninstaller) setOwners(ctx context.Context) (*metav1.OwnerReference, error) {
	owner, err := u.ensureOwner(ctx)
	if err != nil {
		return nil, err
	}
	for _, o := range dependents() {
		if err := u.SetOwner(ctx, o, owner); err != nil {
			return nil, err
		}
	}
	return owner, u.setNamespaceOwner(ctx, owner)
}

// ensureOwner returns the reference to the ClusterRole. An agent that runs outside its member may have no ClusterRole.
// Then ensureOwner creates one without permissions.
func (u *uninstaller) ensureOwner(ctx context.Context) (*metav1.OwnerReference, error) {
	roles := u.member.RbacV1().ClusterRoles()
	role, err := roles.Get(ctx, agentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		role, err = roles.Create(ctx, &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: agentRole, Labels: map[string]string{agentLabel: agentLabelValue}},
		}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return nil, fmt.Errorf("read or create ClusterRole %s: %w", agentRole, err)
	}
	return &metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: agentRole, UID: role.UID}, nil
}

// remove deletes the agent's objects, and then returns session.ErrUninstalled. The garbage collector may still be
// deleting dependents.
func (u *uninstaller) remove(ctx context.Context) error {
	isReplaced, err := u.runsOtherRegistration(ctx)
	if err != nil {
		return err
	}
	if isReplaced {
		err = u.removeSecret(ctx)
	} else {
		err = u.removeAll(ctx)
	}
	if err != nil {
		return err
	}
	return session.ErrUninstalled
}

// removeSecret deletes the Secret of a registration whose agent was replaced.
func (u *uninstaller) removeSecret(ctx context.Context) error {
	err := u.member.CoreV1().Secrets(kube.AgentNamespace).Delete(ctx, u.secretName, deleteInBackground())
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete Secret %s/%s: %w", kube.AgentNamespace, u.secretName, err)
	}
	return nil
}

func deleteInBackground() metav1.DeleteOptions {
	return metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
}

// removeAll deletes the ClusterRole with all objects of the agent as its dependents.
func (u *uninstaller) removeAll(ctx context.Context) error {
	_, err := u.member.RbacV1().ClusterRoles().Get(ctx, agentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil // an earlier call has deleted it
	}
	if err != nil {
		return fmt.Errorf("read ClusterRole %s: %w", agentRole, err)
	}
	// Since prepare, the namespace may have got foreign objects, and the ClusterRole may have another UID.
	owner, err := u.setOwners(ctx)
	if err != nil {
		return err
	}
	if err := u.SetOwner(ctx, u.secretObject(), owner); err != nil {
		return err
	}
	options := deleteInBackground()
	options.Preconditions = metav1.NewUIDPreconditions(string(owner.UID))
	err = u.member.RbacV1().ClusterRoles().Delete(ctx, agentRole, options)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete ClusterRole %s: %w", agentRole, err)
	}
	return nil
}

// rollBack undoes prepare, except for a ClusterRole that ensureOwner created: a nil owner removes the reference.
func (u *uninstaller) rollBack(ctx context.Context) error {
	for _, o := range append(dependents(), agentNamespace(), u.secretObject()) {
		if err := u.SetOwner(ctx, o, nil); err != nil {
			return err
		}
	}
	return u.DeleteUninstallState(ctx, u.secretObject())
}

// runsOtherRegistration returns true if the Deployment runs the agent of another registration, because the manifest of
// that registration was applied later. Then only the Secret belongs to this agent.
func (u *uninstaller) runsOtherRegistration(ctx context.Context) (bool, error) {
	deployment, err := u.member.AppsV1().Deployments(kube.AgentNamespace).Get(ctx, agentName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the agent's Deployment: %w", err)
	}
	for _, container := range deployment.Spec.Template.Spec.Containers {
		for _, arg := range container.Args {
			if secret, found := strings.CutPrefix(arg, secretFlag); found && secret != u.secretName {
				return true, nil
			}
		}
	}
	return false, nil
}

// setNamespaceOwner makes the agent's namespace a dependent of owner if the manifest created it and it has no foreign
// objects. Otherwise the namespace stays.
func (u *uninstaller) setNamespaceOwner(ctx context.Context, owner *metav1.OwnerReference) error {
	live, err := u.member.CoreV1().Namespaces().Get(ctx, kube.AgentNamespace, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read namespace %s: %w", kube.AgentNamespace, err)
	}
	reason := "it was not created by a registration"
	if live.Labels[agentLabel] == agentLabelValue {
		if reason, err = u.ReasonToKeepNamespace(ctx, kube.AgentNamespace, append(dependents(), u.secretObject())); err != nil {
			// A permanent error, for example of a conversion webhook, must not prevent the removal.
			reason = err.Error()
		}
	}
	if reason == "" {
		return u.SetOwner(ctx, agentNamespace(), owner)
	}
	log.FromContext(ctx).Info("keeping the namespace of the agent", "namespace", kube.AgentNamespace, logkeys.Reason, reason)
	return u.SetOwner(ctx, agentNamespace(), nil)
}
