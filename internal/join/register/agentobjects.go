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

// agentObjects are the objects of an agent in a namespace of the cluster. An object that does not exist is nil.
type agentObjects struct {
	namespace      string
	role           *rbacv1.ClusterRole
	deployment     *appsv1.Deployment
	secret         *corev1.Secret
	serviceAccount *corev1.ServiceAccount
}

func (m memberClient) readAgentObjects(ctx context.Context, namespace, deployment string) (agentObjects, error) {
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

// getOrNil reads obj and returns it, or returns nil if it does not exist.
func getOrNil[T client.Object](ctx context.Context, m memberClient, key client.ObjectKey, obj T) (existing T, err error) {
	found, err := m.get(ctx, key, obj)
	if err != nil || !found {
		return existing, err
	}
	return obj, nil
}

// flagValue returns the value of a flag on the agent's command line, or "".
func (a agentObjects) flagValue(flag string) string {
	if a.deployment == nil {
		return ""
	}
	return join.FlagValue(a.deployment, flag)
}

// secretKey returns the key of the Secret with the agent's kubeconfig.
func (a agentObjects) secretKey() client.ObjectKey {
	if namespace, name, ok := strings.Cut(a.flagValue(secretFlag), "/"); ok {
		return client.ObjectKey{Namespace: namespace, Name: name}
	}
	return client.ObjectKey{Namespace: a.namespace, Name: KubeconfigSecret}
}

// cluster returns the name of the agent's Cluster, or "" if it is unknown.
func (a agentObjects) cluster() string {
	if name := a.flagValue(clusterFlag); name != "" || a.role == nil {
		return name
	}
	return a.role.Labels[RegistrationLabel]
}

// isEmpty returns whether there is no agent. A ServiceAccount alone has no rights, and does not count.
func (a agentObjects) isEmpty() bool { return a.role == nil && a.deployment == nil && a.secret == nil }

// isUnfinished returns whether the objects are from a registration that is not finished.
func (a agentObjects) isUnfinished() bool {
	return a.role != nil && a.role.Annotations[unfinishedAnnotation] != ""
}

// existingObjectErrors returns a message for each existing object. Each of them prevents a new registration. Each
// message has the namespace of the agent, even if the Secret is in another one (secretKey).
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
	// Karmada does not report the ClusterRole. It is reported only if no other object exists.
	if a.role != nil && len(problems) == 0 {
		problems = append(problems, "ClusterRole "+a.role.Name+" already exists")
	}
	return problems
}

// PreflightError is returned if existing objects prevent a registration.
type PreflightError struct {
	// Problems are one line each.
	Problems []string
	// Cluster is the name of the Cluster that is registered already, or "" if it is not known.
	Cluster string
}

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

// registrationMode is the action of Register on the agent's objects.
type registrationMode int

const (
	modeNewAgent registrationMode = iota // creates the objects; none may exist
	modeResume                           // completes or replaces the objects of an unfinished registration of the same Cluster
	modeRenew                            // gives the running agent a new certificate
)

// preflight waits for the end of an uninstallation, reads the existing objects, and sets the mode.
func (g *registration) preflight(ctx context.Context) error {
	r := g.request
	if err := g.member.awaitUninstallation(ctx, r.Namespace, r.DiscoveryTimeout, r.Progress); err != nil {
		return fmt.Errorf("check the cluster: %w", err)
	}
	existing, err := g.member.readAgentObjects(ctx, r.Namespace, DefaultAgentDeployment)
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
		return r.checkControlPlane(existing.secret)
	}
	if problems := existing.existingObjectErrors(); len(problems) > 0 {
		return &PreflightError{Problems: problems, Cluster: existing.cluster()}
	}
	return nil
}

// checkControlPlane returns an error if the unfinished registration with this Secret was with another control plane.
// The Cluster there may be in use, so this run must not take its objects.
func (r Request) checkControlPlane(secret *corev1.Secret) error {
	if secret == nil {
		return nil
	}
	config, err := fleet.ParseKubeconfig(secret.Data[KubeconfigKey])
	if err != nil {
		return nil //nolint:nilerr // no agent runs with it, and its control plane deletes an unfinished Cluster
	}
	if config.Host == "https://"+r.Endpoint {
		return nil
	}
	return fmt.Errorf("the cluster has an unfinished registration as %s with another control plane, %s, and not with https://%s: remove that with `karmadactl unregister %s`, or choose another --namespace",
		r.ClusterName, config.Host, r.Endpoint, r.ClusterName)
}
