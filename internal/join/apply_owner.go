package join

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// checkName refuses a registration whose agent is at work on another cluster: two clusters under one name would take
// turns.
func (a *application) checkName(ctx context.Context, hub client.Client) error {
	cluster, found, err := findCluster(ctx, hub, a.request)
	if err != nil || !found {
		return err
	}
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}
	if err := hub.Get(ctx, key, lease); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("read Lease %s: %w", key, err)
	}
	// The hub decides whether the agent is silent: the clock of the agent may be wrong. A cluster whose checks fail is
	// Down too, and its agent is at work.
	other := lease.Annotations[kube.AnnotationMember]
	status := cluster.Status
	silent := status.ConnectionStatus == libv1beta1.ConnectionDown && status.FailureMessage == libv1beta1.AgentReportTooOld
	if other == "" || lease.Spec.RenewTime == nil || silent {
		return nil
	}
	uid, err := memberUID(ctx, a.member)
	if err != nil {
		return err
	}
	return sameMember(a.request, uid, other)
}

// memberUID returns what tells a member from others: the uid of its kube-system namespace; "" if that may not be read.
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

// sameMember says that r is about another cluster than the one that has its name already. A uid that is not known
// proves nothing.
func sameMember(r Request, uid, registered string) error {
	if uid == "" || registered == "" || uid == registered {
		return nil
	}
	return fmt.Errorf("cluster %s is another cluster (the uid of its namespace kube-system is %s, here it is %s): "+
		"deregister it first or choose another name", r.key(), registered, uid)
}

// checkOwner refuses a member whose agent works for another registration: applying would take it away from there. An
// agent whose cluster is not registered on this hub any more, as after a deregistration by force, is replaced.
func (a *application) checkOwner(ctx context.Context, hub *rest.Config, hubClient client.Client) error {
	deployment := &appsv1.Deployment{}
	err := a.member.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment}, deployment)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for an agent on the cluster: %w", err)
	}
	owner := clusterOfAgent(deployment)
	if owner.key() == a.request.key() || owner.Name == "" {
		return nil
	}
	_, found, err := findCluster(ctx, hubClient, owner)
	if err != nil {
		return err
	}
	if found {
		return fmt.Errorf("the agent of %s runs on this cluster already: deregister %s first", owner.key(), owner.key())
	}
	secret := &corev1.Secret{}
	err = a.member.Get(ctx, client.ObjectKey{Namespace: kube.AgentNamespace, Name: KubeconfigSecret(owner.Name)}, secret)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the credentials of the agent on the cluster: %w", err)
	}
	if foreign(ctx, hub, secret.Data[KubeconfigKey]) {
		return fmt.Errorf("the agent of %s of another hub runs on this cluster already: deregister %s there first, or remove it from this cluster: %s",
			owner.key(), owner.key(), strings.Join(RemoveAgent(), "; "))
	}
	a.former = KubeconfigSecret(owner.Name)
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

// foreign says whether an agent's kubeconfig is known to be of another hub: this one did not sign its token. What
// cannot be read proves nothing.
func foreign(ctx context.Context, hub *rest.Config, kubeconfig []byte) bool {
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return false
	}
	var token struct {
		KeyID string `json:"kid"`
	}
	head, _, _ := strings.Cut(config.BearerToken, ".")
	raw, err := base64.RawURLEncoding.DecodeString(head)
	if err != nil || json.Unmarshal(raw, &token) != nil || token.KeyID == "" {
		return false
	}
	clientset, err := kubernetes.NewForConfig(hub)
	if err != nil {
		return false
	}
	raw, err = clientset.Discovery().RESTClient().Get().AbsPath("/openid/v1/jwks").DoRaw(ctx)
	var keys struct {
		Keys []struct {
			ID string `json:"kid"`
		} `json:"keys"`
	}
	if err != nil || json.Unmarshal(raw, &keys) != nil || len(keys.Keys) == 0 {
		return false
	}
	for _, key := range keys.Keys {
		if key.ID == token.KeyID {
			return false
		}
	}
	return true
}

// RemoveAgent returns the commands that remove an agent from its cluster; to be run there.
func RemoveAgent() []string {
	label := agentNameLabel + "=" + agentName
	return []string{
		"kubectl delete clusterroles,clusterrolebindings -l " + label,
		"kubectl delete deployments,services,serviceaccounts,secrets -n " + kube.AgentNamespace + " -l " + label,
	}
}

// dropFormer deletes the credentials of the agent that was replaced, and returns what kubectl says to that.
func (a *application) dropFormer(ctx context.Context) (did string, err error) {
	if a.former == "" {
		return "", nil
	}
	secret := &unstructured.Unstructured{}
	secret.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	secret.SetNamespace(kube.AgentNamespace)
	secret.SetName(a.former)
	before, found, err := a.live(ctx, secret)
	if err != nil || !found {
		return "", err
	}
	// Noted before the request, since a request that was cut off may have done its work.
	a.undo = append(a.undo, func(ctx context.Context) error {
		again := before.DeepCopy()
		again.SetUID("")
		again.SetResourceVersion("")
		err := a.member.Create(ctx, again, client.FieldOwner(kube.FieldManager))
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("take back the deletion of %s on the cluster: %w", describe(before), err)
		}
		return nil
	})
	uid := before.GetUID()
	if err := a.member.Delete(ctx, before, client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("delete %s on the cluster: %w", describe(before), err)
	}
	return kubectlName(before) + " deleted\n", nil
}

// errStillLeaving says that what a former agent leaves is not gone in time.
var errStillLeaving = errors.New("a former agent is still being removed from the cluster")

// leaving looks for what is going away with an agent that was deregistered, and returns the first of it, "" if there is
// nothing.
func (a *application) leaving(ctx context.Context) (string, error) {
	role, found, err := a.live(ctx, agentObject("rbac.authorization.k8s.io/v1", "ClusterRole", client.ObjectKey{Name: agentRole}))
	if err != nil {
		return "", err
	}
	for _, obj := range []*unstructured.Unstructured{
		agentObject("v1", "Namespace", client.ObjectKey{Name: kube.AgentNamespace}),
		agentObject("v1", "ServiceAccount", client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment}),
		agentObject("v1", "Service", client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentService}),
		agentObject("apps/v1", "Deployment", client.ObjectKey{Namespace: kube.AgentNamespace, Name: agentDeployment}),
		agentObject("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", client.ObjectKey{Name: agentRoleBinding}),
		agentObject("v1", "Secret", client.ObjectKey{Namespace: kube.AgentNamespace, Name: KubeconfigSecret(a.request.Name)}),
	} {
		live, there, err := a.live(ctx, obj)
		if err != nil {
			return "", err
		}
		if !there {
			continue
		}
		// What belongs to a ClusterRole that is gone is removed by the cluster at any moment.
		orphan := false
		for _, owner := range live.GetOwnerReferences() {
			orphan = orphan || owner.Kind == "ClusterRole" && owner.Name == agentRole && (!found || owner.UID != role.GetUID())
		}
		if live.GetDeletionTimestamp() != nil || orphan {
			return describe(live), nil
		}
	}
	return "", nil
}

func agentObject(apiVersion, kind string, key client.ObjectKey) *unstructured.Unstructured {
	obj := &unstructured.Unstructured{}
	obj.SetAPIVersion(apiVersion)
	obj.SetKind(kind)
	obj.SetNamespace(key.Namespace)
	obj.SetName(key.Name)
	return obj
}
