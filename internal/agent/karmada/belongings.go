package karmada

import (
	"context"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

const (
	// leavingRole is the Role, and the RoleBinding, by which an agent that shares its ClusterRole with others ends its departure without it.
	leavingRole = "karmada-agent-leaving"
	// hubUserPrefix begins the annotations by which registrations in push mode say that they use a namespace.
	hubUserPrefix = "hub.towline.dev/"
)

// The ways to remove an agent with one last request.
const (
	// byRole: all it has goes with its ClusterRole, which is its own.
	byRole = iota
	// byAccount: another agent of the member uses the ClusterRole. What this one has goes with its ServiceAccount, or its namespace.
	byAccount
	// byHand: it runs elsewhere and keeps its rights.
	byHand
)

// departure removes the agent from its member. The agent's objects are handed to the garbage collector first; deleting one of them then
// removes them all, although it takes the agent's permissions and even if the agent ends.
type departure struct {
	opts   Options
	member kubernetes.Interface
	home   home
	// role and account hand over to the agent's ClusterRole and to its ServiceAccount.
	role, account *session.OwnerClient
	// place is the agent's namespace, and keeper the object in which it keeps what it must know.
	place  string
	keeper session.Object
}

func newDeparture(o Options, member kubernetes.Interface, home home) (*departure, error) {
	d := &departure{opts: o, member: member, home: home, place: o.ElectNamespace}
	d.keeper = session.NewObject(corev1.SchemeGroupVersion.WithResource("configmaps"), o.ElectNamespace, electionName(o.Cluster))
	if secret, ok := home.(secretHome); ok {
		d.place = secret.namespace
		d.keeper = session.NewObject(corev1.SchemeGroupVersion.WithResource("secrets"), secret.namespace, secret.name)
	}
	var err error
	if d.role, err = session.NewOwnerClient(o.Member, "ClusterRole", register.AgentRole); err != nil {
		return nil, err
	}
	d.account, err = session.NewOwnerClient(o.Member, rbacv1.ServiceAccountKind, register.AgentAccount)
	return d, err
}

// dependents are the agent's objects in namespaces, but for the keeper.
func (d *departure) dependents() []session.Object {
	return []session.Object{
		d.serviceAccount(),
		session.NewObject(appsv1.SchemeGroupVersion.WithResource("deployments"), d.place, register.DefaultAgentName),
		session.NewObject(coordinationv1.SchemeGroupVersion.WithResource("leases"), d.opts.ElectNamespace, electionName(d.opts.Cluster)),
	}
}

func (d *departure) serviceAccount() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("serviceaccounts"), d.place, register.AgentAccount)
}

func (d *departure) clusterRole() session.Object {
	return session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterroles"), "", register.AgentRole)
}

func (d *departure) binding() session.Object {
	return session.NewObject(rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"), "", register.AgentRole)
}

// namespace is the agent's, and records that of what it keeps of deployments.
func (d *departure) namespace() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("namespaces"), "", d.place)
}

func (d *departure) records() session.Object {
	return session.NewObject(corev1.SchemeGroupVersion.WithResource("namespaces"), "", d.opts.ClusterNamespace)
}

// doomed is an object that is to be deleted.
type doomed struct {
	session.Object
	uid types.UID
}

// plan is how the agent is removed.
type plan struct {
	way int
	// delete is what is deleted, in order; after the first the rest may be out of reach.
	delete []doomed
}

// plan decides how the agent is removed.
func (d *departure) plan(ctx context.Context) (plan, error) {
	binding, err := d.member.RbacV1().ClusterRoleBindings().Get(ctx, register.AgentRole, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return plan{}, fmt.Errorf("read ClusterRoleBinding %s: %w", register.AgentRole, err)
	}
	if err == nil && len(binding.Subjects) == 1 && d.isSelf(binding.Subjects[0]) {
		role, err := d.ownRole(ctx)
		return plan{byRole, []doomed{role}}, err
	}
	account, accountErr := d.role.Get(ctx, d.serviceAccount())
	switch {
	case accountErr == nil:
		p := plan{byAccount, []doomed{{d.serviceAccount(), account.UID}}}
		if namespace, ok, err := d.removable(ctx, d.namespace()); err == nil && ok {
			p.delete = []doomed{namespace}
		}
		return p, nil
	case !apierrors.IsNotFound(accountErr):
		return plan{}, fmt.Errorf("read %s: %w", d.serviceAccount(), accountErr)
	}
	return d.planByHand(ctx)
}

func (d *departure) planByHand(ctx context.Context) (plan, error) {
	p := plan{way: byHand}
	for _, o := range append(d.dependents(), d.keeper) {
		live, err := d.role.Get(ctx, o)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return p, fmt.Errorf("read %s: %w", o, err)
		}
		p.delete = append(p.delete, doomed{o, live.UID})
	}
	// The keeper goes last, but for what is of no more use without it.
	for _, o := range []session.Object{d.records(), d.namespace()} {
		found, ok, err := d.removable(ctx, o)
		if err != nil {
			return p, err
		}
		if ok {
			p.delete = slices.Insert(p.delete, max(len(p.delete)-1, 0), found)
		}
	}
	return p, nil
}

func (d *departure) isSelf(subject rbacv1.Subject) bool {
	return subject.Kind == rbacv1.ServiceAccountKind && subject.Namespace == d.place && subject.Name == register.AgentAccount
}

// ownRole returns the agent's ClusterRole. If somebody has deleted it, one is made that permits nothing.
func (d *departure) ownRole(ctx context.Context) (doomed, error) {
	roles := d.member.RbacV1().ClusterRoles()
	role, err := roles.Get(ctx, register.AgentRole, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		role, err = roles.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: d.meta(register.AgentRole)}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return doomed{}, fmt.Errorf("read ClusterRole %s: %w", register.AgentRole, err)
	}
	return doomed{d.clusterRole(), role.UID}, nil
}

// handOver makes the agent's objects dependents of the one that is deleted.
func (d *departure) handOver(ctx context.Context, p plan) error {
	switch p.way {
	case byRole:
		return d.handOverToRole(ctx, p.delete[0].uid)
	case byAccount:
		account, err := d.role.Get(ctx, d.serviceAccount())
		if err != nil {
			return fmt.Errorf("read %s: %w", d.serviceAccount(), err)
		}
		return d.handOverToAccount(ctx, &metav1.OwnerReference{
			APIVersion: "v1", Kind: rbacv1.ServiceAccountKind, Name: register.AgentAccount, UID: account.UID,
		})
	}
	return nil
}

func (d *departure) handOverToRole(ctx context.Context, uid types.UID) error {
	owner := &metav1.OwnerReference{APIVersion: rbacv1.SchemeGroupVersion.String(), Kind: "ClusterRole", Name: register.AgentRole, UID: uid}
	for _, o := range append(d.dependents(), d.binding(), d.keeper) {
		if err := d.role.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	for _, o := range []session.Object{d.namespace(), d.records()} {
		wanted := owner
		if _, ok, err := d.removable(ctx, o); err != nil || !ok {
			// What cannot be seen may be somebody's.
			wanted = nil
		}
		if err := d.role.SetOwner(ctx, o, wanted); err != nil {
			return err
		}
	}
	return nil
}

// handOverToAccount lets what is in the agent's namespace go with its ServiceAccount, which keeps its rights in that namespace to the end.
func (d *departure) handOverToAccount(ctx context.Context, owner *metav1.OwnerReference) error {
	meta := d.meta(leavingRole)
	meta.Namespace, meta.OwnerReferences = d.place, []metav1.OwnerReference{*owner}
	rbac, create := d.member.RbacV1(), metav1.CreateOptions{FieldManager: kube.FieldManager}
	_, err := rbac.Roles(d.place).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{rbacv1.APIGroupAll}, Resources: []string{rbacv1.ResourceAll}, Verbs: []string{rbacv1.VerbAll}},
	}}, create)
	if err == nil || apierrors.IsAlreadyExists(err) {
		_, err = rbac.RoleBindings(d.place).Create(ctx, &rbacv1.RoleBinding{
			ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: leavingRole},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: d.place, Name: register.AgentAccount}},
		}, create)
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make Role %s/%s: %w", d.place, leavingRole, err)
	}
	for _, o := range append(d.dependents(), d.keeper) {
		if o == d.serviceAccount() || o.Namespace != d.place {
			continue
		}
		if err := d.account.SetOwner(ctx, o, owner); err != nil {
			return err
		}
	}
	return nil
}

// unbind takes the agent out of the ClusterRoleBinding that it shares. Without rights to look it is out already.
func (d *departure) unbind(ctx context.Context) error {
	bindings := d.member.RbacV1().ClusterRoleBindings()
	err := kube.OnConflict(ctx, func() error {
		binding, err := bindings.Get(ctx, register.AgentRole, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(binding.Subjects, d.isSelf) {
			return nil
		}
		binding.Subjects = slices.DeleteFunc(binding.Subjects, d.isSelf)
		_, err = bindings.Update(ctx, binding, metav1.UpdateOptions{FieldManager: kube.FieldManager})
		return err
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
		return fmt.Errorf("leave ClusterRoleBinding %s: %w", register.AgentRole, err)
	}
	return nil
}

func (d *departure) dropLeavingRole(ctx context.Context) error {
	rbac := d.member.RbacV1()
	for _, err := range []error{
		rbac.RoleBindings(d.place).Delete(ctx, leavingRole, metav1.DeleteOptions{}), rbac.Roles(d.place).Delete(ctx, leavingRole, metav1.DeleteOptions{}),
	} {
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete Role %s/%s: %w", d.place, leavingRole, err)
		}
	}
	return nil
}

// removable says whether a namespace was made for this agent, and nobody else has anything in it.
func (d *departure) removable(ctx context.Context, o session.Object) (doomed, bool, error) {
	live, err := d.role.Get(ctx, o)
	if apierrors.IsNotFound(err) {
		return doomed{}, false, nil
	}
	if err != nil {
		return doomed{}, false, fmt.Errorf("read %s: %w", o, err)
	}
	if cluster := live.Labels[register.RegistrationLabel]; live.Labels[clusterv1alpha1.SystemLabel] != "true" || (cluster != "" && cluster != d.opts.Cluster) {
		return doomed{}, false, nil
	}
	for key := range live.Annotations {
		if strings.HasPrefix(key, hubUserPrefix) {
			return doomed{}, false, nil
		}
	}
	expected := map[string]bool{"roles.rbac.authorization.k8s.io/" + leavingRole: true, "rolebindings.rbac.authorization.k8s.io/" + leavingRole: true}
	for _, own := range append(d.dependents(), d.keeper) {
		if own.Namespace == o.Name {
			expected[own.Resource.GroupResource().String()+"/"+own.Name] = true
		}
	}
	premises := session.NamespaceCheck{Discovery: d.member.Discovery(), Objects: d.role.Metadata, Namespace: o.Name, Expected: expected}
	stranger, err := premises.FindForeignObject(ctx)
	return doomed{o, live.UID}, stranger == "" && err == nil, err
}

// meta is the metadata of what the agent makes for itself.
func (d *departure) meta(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: d.opts.Cluster}}
}
