package join

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// checkName returns an error if an agent on another cluster is alive under this name: the two agents would compete.
func (a *application) checkName(ctx context.Context) error {
	cluster, found, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil || !found {
		return err
	}
	lease := &coordinationv1.Lease{}
	if _, err := read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}); err != nil {
		return err
	}
	// The hub has decided whether the agent is silent: the clock of the agent may be wrong. A cluster whose checks fail is
	// Down too, and its agent is alive.
	status := cluster.Status
	isSilent := status.ConnectionStatus == libv1beta1.ConnectionDown && status.FailureMessage == libv1beta1.AgentReportTooOld
	if lease.Annotations[kube.AnnotationMember] == "" || lease.Spec.RenewTime == nil || isSilent {
		return nil
	}
	uid, err := memberUID(ctx, a.member)
	if err != nil {
		return err
	}
	return checkSameMember(a.request.Request, uid, lease.Annotations[kube.AnnotationMember])
}

// memberUID returns the uid of the member's kube-system namespace, which identifies it; "" if that may not be read.
func memberUID(ctx context.Context, member client.Reader) (string, error) {
	uid, err := HubUID(ctx, member)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("ask the cluster which one it is: %w", err)
	}
	return uid, nil
}

// checkSameMember returns an error if both uids are known and differ.
func checkSameMember(r Request, uid, registered string) error {
	if uid == "" || registered == "" || uid == registered {
		return nil
	}
	return fmt.Errorf("cluster %s is another cluster (the uid of its namespace kube-system is %s, here it is %s): "+
		"deregister it first or choose another name", r.key(), registered, uid)
}

// checkAgent returns an error if the member's agent works for another registration, from which applying would take it
// away. An agent whose cluster is not registered on this hub any more, as after a deregistration by force, is replaced.
func (a *application) checkAgent(ctx context.Context, hub *rest.Config) error {
	deployment := &appsv1.Deployment{}
	found, err := read(ctx, a.member, deployment, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment})
	if err != nil || !found {
		return err
	}
	owner := clusterOfAgent(deployment)
	if owner.key() == a.request.key() || owner.Name == "" {
		return nil
	}
	_, found, err = findCluster(ctx, a.hub, owner)
	if err != nil {
		return err
	}
	if found {
		return fmt.Errorf("the agent of %s runs on this cluster already: deregister %s first", owner.key(), owner.key())
	}
	secret := &corev1.Secret{}
	found, err = read(ctx, a.member, secret, client.ObjectKey{Namespace: kube.AgentNamespace, Name: KubeconfigSecret(owner.Name)})
	if err != nil || !found {
		return err
	}
	if isForAnotherHub(ctx, hub, secret.Data[KubeconfigKey]) {
		return fmt.Errorf("the agent of %s of another hub runs on this cluster already: deregister %s there first, or remove it from this cluster: %s",
			owner.key(), owner.key(), strings.Join(RemoveAgent(), "; "))
	}
	a.formerSecret = secret.Name
	return nil
}

// clusterOfAgent returns the cluster that an agent works for; its name is empty if it does not say.
func clusterOfAgent(deployment *appsv1.Deployment) Request {
	for _, container := range deployment.Spec.Template.Spec.Containers {
		namespace, name := argument(container.Args, "--cluster-namespace="), argument(container.Args, "--cluster-name=")
		if namespace != "" && name != "" {
			return Request{Namespace: namespace, Name: name}
		}
	}
	return Request{}
}

func argument(args []string, flag string) string {
	if i := slices.IndexFunc(args, func(arg string) bool { return strings.HasPrefix(arg, flag) }); i >= 0 {
		return strings.TrimPrefix(args[i], flag)
	}
	return ""
}

// isForAnotherHub returns whether an agent's kubeconfig is known to be for another hub: its token was not signed with a
// key of this one.
func isForAnotherHub(ctx context.Context, hub *rest.Config, kubeconfig []byte) bool {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return false
	}
	header, _, _ := strings.Cut(config.BearerToken, ".")
	raw, err := base64.RawURLEncoding.DecodeString(header)
	keyID := regexp.MustCompile(`"kid":"[^"]+"`).Find(raw)
	if err != nil || keyID == nil {
		return false
	}
	clientset, err := kubernetes.NewForConfig(hub)
	if err != nil {
		return false
	}
	keys, err := clientset.Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(ctx)
	return err == nil && bytes.Contains(keys, []byte(`"kid":"`)) && !bytes.Contains(keys, keyID)
}

// RemoveAgent returns the commands that remove an agent from its cluster; to be run there.
func RemoveAgent() []string {
	label := agentNameLabel + "=" + agentName
	return []string{
		"kubectl delete clusterroles,clusterrolebindings -l " + label,
		"kubectl delete deployments,services,serviceaccounts,secrets -n " + kube.AgentNamespace + " -l " + label,
	}
}

// findLeaving returns the first object of a former agent that is being deleted, "" if there is none.
func (a *application) findLeaving(ctx context.Context) (string, error) {
	role := &rbacv1.ClusterRole{}
	found, err := read(ctx, a.member, role, client.ObjectKey{Name: agentRole})
	if err != nil {
		return "", err
	}
	inAgentNamespace := func(name string) metav1.ObjectMeta { return named(kube.AgentNamespace, name) }
	for _, obj := range []client.Object{
		&corev1.Namespace{ObjectMeta: named("", kube.AgentNamespace)},
		&corev1.ServiceAccount{ObjectMeta: inAgentNamespace(agentDeployment)},
		&corev1.Service{ObjectMeta: inAgentNamespace(agentService)},
		&appsv1.Deployment{ObjectMeta: inAgentNamespace(agentDeployment)},
		&rbacv1.ClusterRoleBinding{ObjectMeta: named("", agentRoleBinding)},
		&corev1.Secret{ObjectMeta: inAgentNamespace(KubeconfigSecret(a.request.Name))},
	} {
		if _, err := read(ctx, a.member, obj, client.ObjectKeyFromObject(obj)); err != nil {
			return "", err
		}
		// The garbage collector may delete the objects of a ClusterRole that does not exist at any moment.
		isOrphan := slices.ContainsFunc(obj.GetOwnerReferences(), func(owner metav1.OwnerReference) bool {
			return owner.Kind == "ClusterRole" && owner.Name == agentRole && (!found || owner.UID != role.UID)
		})
		if obj.GetDeletionTimestamp() != nil || isOrphan {
			return refOf(a.member, obj).String(), nil
		}
	}
	return "", nil
}
