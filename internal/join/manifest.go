package join

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// DefaultAgentImage is the container image of the agent unless a registration names another one.
const DefaultAgentImage = "towline:latest"

// The names of the agent's objects on a member. Manifests, patches and habits of the Sveltos surface rely on them.
const (
	agentName         = "sveltos-applier"
	agentDeployment   = "sveltos-applier-manager"
	agentRole         = "sveltos-applier-manager-role"
	agentRoleBinding  = "sveltos-applier-manager-rolebinding"
	agentService      = "sveltos-applier-metrics-service"
	agentNameLabel    = "app.kubernetes.io/name"
	controlPlaneLabel = "control-plane"
)

// KubeconfigSecret returns the name of the Secret with a cluster's kubeconfig: on the hub for a push-mode cluster, and
// on the member, with the way to the hub, for a pull-mode cluster.
func KubeconfigSecret(cluster string) string { return fleet.KubeconfigSecretName(cluster) }

// KubeconfigKey is the key of the kubeconfig in that Secret.
const KubeconfigKey = "kubeconfig"

// agentManifest is what a member's manifest is made from.
type agentManifest struct {
	request Request
	options AgentOptions
	// image is the agent's container image if the options name none.
	image      string
	version    string
	kubeconfig *clientcmdapi.Config
	// patches are applied to the documents, in order.
	patches []patch
}

// encode returns the documents that start the agent on the member, in the order in which they are applied. It fails
// with ErrPatch if a patch cannot be applied.
func (m agentManifest) encode() ([]byte, error) {
	credentials, err := clientcmd.Write(*m.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's kubeconfig: %w", err)
	}
	deployment, err := m.deploymentSpec()
	if err != nil {
		return nil, err
	}
	objects := []*unstructured.Unstructured{
		object("v1", "Namespace", metadata{name: kube.AgentNamespace}, nil),
		object("v1", "ServiceAccount", metadata{kube.AgentNamespace, agentDeployment}, nil),
		object("rbac.authorization.k8s.io/v1", "ClusterRole", metadata{name: agentRole}, map[string]any{
			"rules": []any{map[string]any{"apiGroups": []any{"*"}, "resources": []any{"*"}, "verbs": []any{"*"}}},
		}),
		object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", metadata{name: agentRoleBinding}, map[string]any{
			"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": agentRole},
			"subjects": []any{map[string]any{"kind": "ServiceAccount", "name": agentDeployment, "namespace": kube.AgentNamespace}},
		}),
		object("v1", "Service", metadata{kube.AgentNamespace, agentService}, map[string]any{
			"spec": map[string]any{
				"ports":    []any{map[string]any{"name": "https", "port": 8443, "protocol": "TCP", "targetPort": 8443}},
				"selector": map[string]any{controlPlaneLabel: agentName},
			},
		}),
		object("apps/v1", "Deployment", metadata{kube.AgentNamespace, agentDeployment}, map[string]any{"spec": deployment}),
		object("v1", "Secret", metadata{kube.AgentNamespace, KubeconfigSecret(m.request.Name)}, map[string]any{
			"data": map[string]any{KubeconfigKey: base64.StdEncoding.EncodeToString(credentials)},
			"type": "Opaque",
		}),
	}
	for _, p := range m.patches {
		if err := p.applyTo(objects); err != nil {
			return nil, err
		}
	}
	var out bytes.Buffer
	for i, obj := range objects {
		text, err := yaml.Marshal(obj.Object)
		if err != nil {
			return nil, fmt.Errorf("encode the manifest: %w", err)
		}
		if i > 0 {
			out.WriteString("---\n")
		}
		out.Write(text)
	}
	return out.Bytes(), nil
}

type metadata struct{ namespace, name string }

func object(apiVersion, kind string, m metadata, fields map[string]any) *unstructured.Unstructured {
	meta := map[string]any{"name": m.name, "labels": map[string]any{agentNameLabel: agentName}}
	if m.namespace != "" {
		meta["namespace"] = m.namespace
	}
	document := map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": meta}
	for key, value := range fields {
		document[key] = value
	}
	return &unstructured.Unstructured{Object: document}
}

func (m agentManifest) deploymentSpec() (map[string]any, error) {
	requests, limits, err := m.options.resources()
	if err != nil {
		return nil, err
	}
	container := m.container()
	container["resources"] = map[string]any{"limits": limits, "requests": requests}
	pod := map[string]any{
		"containers": []any{container},
		"securityContext": map[string]any{
			"runAsNonRoot": true, "seccompProfile": map[string]any{"type": "RuntimeDefault"},
		},
		"serviceAccountName":            agentDeployment,
		"terminationGracePeriodSeconds": 10,
	}
	if len(m.options.ImagePullSecrets) > 0 {
		secrets := []any{}
		for _, name := range m.options.ImagePullSecrets {
			secrets = append(secrets, map[string]any{"name": name})
		}
		pod["imagePullSecrets"] = secrets
	}
	labels := map[string]any{agentNameLabel: agentName, controlPlaneLabel: agentName}
	return map[string]any{
		"replicas": 1,
		"selector": map[string]any{"matchLabels": labels},
		// Two agents would work on the same objects.
		"strategy": map[string]any{"type": "Recreate"},
		"template": map[string]any{"metadata": map[string]any{"labels": labels}, "spec": pod},
	}, nil
}

func (m agentManifest) container() map[string]any {
	return map[string]any{
		"name":    "controller",
		"image":   cmp.Or(m.options.Image, m.image, DefaultAgentImage),
		"command": []any{"/manager"},
		"args": []any{
			"agent",
			"--diagnostics-address=:8443",
			"--cluster-namespace=" + m.request.Namespace,
			"--cluster-name=" + m.request.Name,
			"--cluster-type=sveltos",
			"--secret-with-kubeconfig=" + KubeconfigSecret(m.request.Name),
			"--v=5",
			"--version=" + m.version,
		},
		"env": []any{
			resourceEnv("GOMEMLIMIT", "limits.memory"),
			resourceEnv("GOMAXPROCS", "limits.cpu"),
			map[string]any{"name": "NAMESPACE", "valueFrom": map[string]any{"fieldRef": map[string]any{"fieldPath": "metadata.namespace"}}},
		},
		"ports": []any{
			map[string]any{"containerPort": 8443, "name": "metrics", "protocol": "TCP"},
			map[string]any{"containerPort": 9440, "name": "healthz", "protocol": "TCP"},
		},
		"livenessProbe":  probe("/healthz", 15, 20),
		"readinessProbe": probe("/readyz", 5, 10),
		"securityContext": map[string]any{
			"allowPrivilegeEscalation": false, "capabilities": map[string]any{"drop": []any{"ALL"}},
		},
	}
}

func resourceEnv(name, resource string) map[string]any {
	return map[string]any{"name": name, "valueFrom": map[string]any{"resourceFieldRef": map[string]any{"resource": resource}}}
}

func probe(path string, delay, period int) map[string]any {
	return map[string]any{
		"httpGet": map[string]any{"path": path, "port": "healthz"}, "initialDelaySeconds": delay, "periodSeconds": period,
	}
}
