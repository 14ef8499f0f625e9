package register

import (
	"context"
	"fmt"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/foreign"
	"github.com/towline/towline/internal/kube"
)

const (
	// requestTimeout limits one request to the cluster or to the control plane.
	requestTimeout = 10 * time.Second
	// pollInterval is the time between two reads in a wait.
	pollInterval = 250 * time.Millisecond
)

// memberClient is a client for the cluster, without warnings. resources is its discovery client.
type memberClient struct {
	client.Client
	resources foreign.Resources
}

// newMemberClient returns a client for the cluster. The end of ctx cancels the reads in flight. Reads that begin after
// it (a rollback) run normally, see kube.Interruptible.
func newMemberClient(ctx context.Context, config *rest.Config) (memberClient, error) {
	config = kube.Interruptible(ctx, config)
	config.WarningHandler, config.WarningHandlerWithContext = rest.NoWarnings{}, nil
	base, resources, err := join.NewClient(config, requestTimeout)
	if err != nil {
		return memberClient{}, fmt.Errorf("connect to the cluster: %w", err)
	}
	return memberClient{base, resources}, nil
}

// get reads an object into obj, and returns whether it exists.
func (m memberClient) get(ctx context.Context, key client.ObjectKey, obj client.Object) (bool, error) {
	err := m.Get(ctx, key, obj)
	if client.IgnoreNotFound(err) != nil {
		ref := kube.RefIn(m.Scheme(), obj)
		ref.Namespace, ref.Name = key.Namespace, key.Name
		return false, fmt.Errorf("read %s on the cluster: %w", ref, err)
	}
	return err == nil, nil
}

// findTerminatingObject returns "<kind> <key>" of the first of the agent's objects that is being deleted or that the
// garbage collector will delete, or "", see join.FindUninstalling. The Namespace is the last.
func (m memberClient) findTerminatingObject(ctx context.Context, namespace string) (string, error) {
	role := &rbacv1.ClusterRole{}
	if _, err := m.get(ctx, client.ObjectKey{Name: AgentRole(namespace)}, role); err != nil {
		return "", err
	}
	role.Name = AgentRole(namespace) // FindUninstalling needs the name even if the ClusterRole does not exist
	return join.FindUninstalling(ctx, m, role, []kube.Ref{
		{Group: rbacv1.GroupName, Version: "v1", Kind: "ClusterRoleBinding", Name: role.Name},
		{Version: "v1", Kind: "ServiceAccount", Namespace: namespace, Name: AgentServiceAccount},
		{Version: "v1", Kind: "Secret", Namespace: namespace, Name: KubeconfigSecret},
		{Group: "apps", Version: "v1", Kind: "Deployment", Namespace: namespace, Name: DefaultAgentDeployment},
		{Version: "v1", Kind: "Namespace", Name: namespace},
	})
}

// awaitUninstallation waits until no agent is being uninstalled from the namespace. It calls progress for each object.
func (m memberClient) awaitUninstallation(ctx context.Context, namespace string, timeout time.Duration, progress func(string)) error {
	find := func(ctx context.Context) (string, error) { return m.findTerminatingObject(ctx, namespace) }
	return join.AwaitUninstallation(ctx, timeout, find, func(object string) {
		progress("waiting for a former agent to be gone from the cluster: " + object)
	})
}
