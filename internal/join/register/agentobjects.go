package register

import (
	"context"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
)

// agentObjects are the objects of an agent in a namespace of the cluster; nil for those that do not exist.
type agentObjects struct {
	namespace      string
	role           *rbacv1.ClusterRole
	deployment     *appsv1.Deployment
	secret         *corev1.Secret
	serviceAccount *corev1.ServiceAccount
}

// agentObjects reads the objects of the agent whose Deployment has the given name.
func (m memberClient) agentObjects(ctx context.Context, namespace, deployment string) (agentObjects, error) {
	a := agentObjects{namespace: namespace}
	var err error
	if a.deployment, err = getOrNil(ctx, m, client.ObjectKey{Namespace: namespace, Name: deployment}, &appsv1.Deployment{}); err != nil {
		return a, err
	}
	if a.secret, err = getOrNil(ctx, m, a.secretKey(), &corev1.Secret{}); err != nil {
		return a, err
	}
	if a.serviceAccount, err = getOrNil(ctx, m, client.ObjectKey{Namespace: namespace, Name: AgentServiceAccount}, &corev1.ServiceAccount{}); err != nil {
		return a, err
	}
	a.role, err = getOrNil(ctx, m, client.ObjectKey{Name: AgentRole(namespace)}, &rbacv1.ClusterRole{})
	return a, err
}

// getOrNil returns obj with the content that it has on the cluster, or nil if it does not exist.
func getOrNil[T client.Object](ctx context.Context, m memberClient, key client.ObjectKey, obj T) (existing T, err error) {
	found, err := m.get(ctx, key, obj)
	if err != nil || !found {
		return existing, err
	}
	return obj, nil
}

// argument returns the value of a flag on the agent's command line.
func (a agentObjects) argument(flag string) string {
	if a.deployment == nil {
		return ""
	}
	return join.Argument(a.deployment, flag)
}

// secretKey returns the key of the Secret with the kubeconfig for the control plane.
func (a agentObjects) secretKey() client.ObjectKey {
	if namespace, name, ok := strings.Cut(a.argument(secretFlag), "/"); ok {
		return client.ObjectKey{Namespace: namespace, Name: name}
	}
	return client.ObjectKey{Namespace: a.namespace, Name: KubeconfigSecret}
}

// kubeconfig returns the kubeconfig for the control plane, or nil.
func (a agentObjects) kubeconfig() []byte {
	if a.secret == nil {
		return nil
	}
	return a.secret.Data[KubeconfigKey]
}

// cluster returns the name of the agent's Cluster, or "" if it is not known.
func (a agentObjects) cluster() string {
	if name := a.argument(clusterFlag); name != "" || a.role == nil {
		return name
	}
	return a.role.Labels[RegistrationLabel]
}

func (a agentObjects) isEmpty() bool { return a.role == nil && a.deployment == nil && a.secret == nil }

// isUnfinished returns whether the objects are those of a registration that was not completed.
func (a agentObjects) isUnfinished() bool {
	return a.role != nil && a.role.Annotations[unfinishedAnnotation] != ""
}

// existingObjectErrors describes the objects that exist, each of which prevents a new registration.
func (a agentObjects) existingObjectErrors() []string {
	var problems []string
	add := func(exists bool, name, kind string) {
		if exists {
			problems = append(problems, fmt.Sprintf("%s/%s %s already exists", a.namespace, name, kind))
		}
	}
	add(a.secret != nil, a.secretKey().Name, "Secret")
	add(a.serviceAccount != nil, AgentServiceAccount, "ServiceAccount")
	if a.deployment != nil {
		add(true, a.deployment.Name, "Deployment")
	}
	if a.role != nil && len(problems) == 0 { // Karmada does not report it
		problems = append(problems, "ClusterRole "+a.role.Name+" already exists")
	}
	return problems
}

// PreflightError has the objects of the cluster that prevent a registration.
type PreflightError struct {
	// Problems are one line each.
	Problems []string
	// Cluster is the name of the Cluster that is registered already, or "" if it is not known.
	Cluster string
}

// Error lists the problems and the remedy.
func (e *PreflightError) Error() string {
	var text strings.Builder
	text.WriteString("error execution phase preflight: [preflight] Some fatal errors occurred:\n")
	for _, problem := range e.Problems {
		text.WriteString("\t[ERROR]: " + problem + "\n")
	}
	if e.Cluster == "" {
		text.WriteString("[preflight] Remove these from the cluster, or choose another --namespace")
	} else {
		fmt.Fprintf(&text, "[preflight] The cluster runs the agent of Cluster %s already: remove that with `karmadactl unregister %s`, or choose another --namespace",
			e.Cluster, e.Cluster)
	}
	return text.String()
}

// registrationMode is the action of a registration on the agent's objects.
type registrationMode int

const (
	modeNewAgent registrationMode = iota // create them; none may exist
	modeResume                           // complete or replace those of an unfinished registration of the same Cluster
	modeRenew                            // give the running agent a new certificate
)

// preflight checks the cluster, and sets the mode.
func (g *registration) preflight(ctx context.Context) error {
	r := g.request
	if err := g.member.awaitUninstallation(ctx, r.Namespace, r.DiscoveryTimeout, r.Progress); err != nil {
		return fmt.Errorf("check the cluster: %w", err)
	}
	existing, err := g.member.agentObjects(ctx, r.Namespace, DefaultAgentDeployment)
	if err != nil {
		return fmt.Errorf("check the cluster: %w", err)
	}
	g.existing = existing
	switch {
	case r.Renew && existing.deployment == nil:
		return fmt.Errorf("there is no agent in namespace %s of the cluster whose certificate could be renewed: register without --renew", r.Namespace)
	case r.Renew && existing.cluster() != r.ClusterName:
		return fmt.Errorf("namespace %s of the cluster has the agent of Cluster %q, not of %s", r.Namespace, existing.cluster(), r.ClusterName)
	case r.Renew:
		g.mode = modeRenew
		return nil
	case existing.isUnfinished() && existing.cluster() == r.ClusterName:
		g.mode = modeResume
		return r.checkControlPlane(existing.kubeconfig())
	}
	if problems := existing.existingObjectErrors(); len(problems) > 0 {
		return &PreflightError{Problems: problems, Cluster: existing.cluster()}
	}
	return nil
}

// checkControlPlane returns an error if the kubeconfig of an unfinished registration is for another control plane: the
// Cluster of that registration would stay there.
func (r Request) checkControlPlane(kubeconfig []byte) error {
	config, err := fleet.ParseKubeconfig(kubeconfig)
	if err != nil {
		return nil //nolint:nilerr // without a kubeconfig the earlier run has created no Cluster
	}
	if config.Host == "https://"+r.Endpoint {
		return nil
	}
	return fmt.Errorf("the cluster has an unfinished registration as %s with another control plane, %s, and not with https://%s: remove that with `karmadactl unregister %s`, or choose another --namespace",
		r.ClusterName, config.Host, r.Endpoint, r.ClusterName)
}
