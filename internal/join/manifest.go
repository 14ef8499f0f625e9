package join

import (
	"bytes"
	"encoding/base64"
	"fmt"

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

// KubeconfigSecret returns the name of the Secret with a cluster's kubeconfig: on the hub for a push-mode cluster, and on the member,
// with the way to the hub, for a pull-mode cluster.
func KubeconfigSecret(cluster string) string { return fleet.KubeconfigSecretName(cluster) }

// KubeconfigKey is the key of the kubeconfig in that Secret.
const KubeconfigKey = "kubeconfig"

// kubeconfig returns the agent's kubeconfig for the hub. The context's namespace is where the deliveries are.
func (a hubAddress) kubeconfig(token, delivery string) *clientcmdapi.Config {
	const cluster, context = "local", "sveltos-context"
	config := clientcmdapi.NewConfig()
	config.Clusters[cluster] = &clientcmdapi.Cluster{Server: a.server, TLSServerName: a.serverName, CertificateAuthorityData: a.ca}
	config.AuthInfos[agentName] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts[context] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: agentName, Namespace: delivery}
	config.CurrentContext = context
	return config
}

// manifestOf returns the documents that start the agent on the member, in the order in which they are applied.
func manifestOf(r PullRequest, kubeconfig *clientcmdapi.Config) ([]byte, error) {
	credentials, err := clientcmd.Write(*kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's kubeconfig: %w", err)
	}
	documents := []map[string]any{
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
		object("apps/v1", "Deployment", metadata{kube.AgentNamespace, agentDeployment}, map[string]any{"spec": deploymentSpec(r)}),
		object("v1", "Secret", metadata{kube.AgentNamespace, KubeconfigSecret(r.Name)}, map[string]any{
			"data": map[string]any{KubeconfigKey: base64.StdEncoding.EncodeToString(credentials)},
			"type": "Opaque",
		}),
	}
	var out bytes.Buffer
	for i, document := range documents {
		text, err := yaml.Marshal(document)
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

func object(apiVersion, kind string, m metadata, fields map[string]any) map[string]any {
	meta := map[string]any{"name": m.name, "labels": map[string]any{agentNameLabel: agentName}}
	if m.namespace != "" {
		meta["namespace"] = m.namespace
	}
	document := map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": meta}
	for key, value := range fields {
		document[key] = value
	}
	return document
}

func deploymentSpec(r PullRequest) map[string]any {
	labels := map[string]any{agentNameLabel: agentName, controlPlaneLabel: agentName}
	return map[string]any{
		"replicas": 1,
		"selector": map[string]any{"matchLabels": labels},
		// Two agents would work on the same objects.
		"strategy": map[string]any{"type": "Recreate"},
		"template": map[string]any{
			"metadata": map[string]any{"labels": labels},
			"spec": map[string]any{
				"containers": []any{container(r)},
				"securityContext": map[string]any{
					"runAsNonRoot": true, "seccompProfile": map[string]any{"type": "RuntimeDefault"},
				},
				"serviceAccountName":            agentDeployment,
				"terminationGracePeriodSeconds": 10,
			},
		},
	}
}

func container(r PullRequest) map[string]any {
	image := r.AgentImage
	if image == "" {
		image = DefaultAgentImage
	}
	return map[string]any{
		"name":    "controller",
		"image":   image,
		"command": []any{"/manager"},
		"args": []any{
			"agent",
			"--diagnostics-address=:8443",
			"--cluster-namespace=" + r.Namespace,
			"--cluster-name=" + r.Name,
			"--cluster-type=sveltos",
			"--secret-with-kubeconfig=" + KubeconfigSecret(r.Name),
			"--v=5",
			"--version=" + r.Version,
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
		"resources": map[string]any{
			"limits":   map[string]any{"cpu": "500m", "memory": "512Mi"},
			"requests": map[string]any{"cpu": "200m", "memory": "512Mi"},
		},
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
