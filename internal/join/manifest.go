package join

import (
	"bytes"
	"cmp"
	_ "embed" // for agent.yaml
	"encoding/json"
	"fmt"
	"text/template"

	corev1 "k8s.io/api/core/v1"
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
	objects, err := m.objects(credentials)
	if err != nil {
		return nil, err
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

//go:embed agent.yaml
var agentYAML string

// RenderManifest returns the objects of a manifest in YAML, which is a template. In it, the function json encodes a
// value as JSON, which is YAML as well: a value cannot add fields.
func RenderManifest(manifest string, values any) ([]*unstructured.Unstructured, error) {
	encode := func(value any) (string, error) {
		text, err := json.Marshal(value)
		return string(text), err
	}
	parsed, err := template.New("manifest").Funcs(template.FuncMap{"json": encode}).Parse(manifest)
	if err != nil {
		return nil, fmt.Errorf("parse the manifest: %w", err)
	}
	var text bytes.Buffer
	if err := parsed.Execute(&text, values); err != nil {
		return nil, fmt.Errorf("encode the manifest: %w", err)
	}
	return kube.DecodeManifest(text.Bytes())
}

// objects returns the objects of agent.yaml, with the label of the agent.
func (m agentManifest) objects(credentials []byte) ([]*unstructured.Unstructured, error) {
	requests, limits, err := m.options.resources()
	if err != nil {
		return nil, err
	}
	values := map[string]any{
		"Image": cmp.Or(m.options.Image, m.image, DefaultAgentImage), "Requests": requests, "Limits": limits,
		"Secret": KubeconfigSecret(m.request.Name), "Kubeconfig": credentials,
		"Args": []string{
			"agent",
			"--diagnostics-address=:8443",
			"--cluster-namespace=" + m.request.Namespace,
			"--cluster-name=" + m.request.Name,
			"--cluster-type=sveltos",
			"--secret-with-kubeconfig=" + KubeconfigSecret(m.request.Name),
			"--v=5",
			"--version=" + m.version,
		},
	}
	var secrets []corev1.LocalObjectReference
	for _, name := range m.options.ImagePullSecrets {
		secrets = append(secrets, corev1.LocalObjectReference{Name: name})
	}
	values["ImagePullSecrets"] = secrets
	objects, err := RenderManifest(agentYAML, values)
	for _, obj := range objects {
		obj.SetLabels(map[string]string{agentNameLabel: agentName})
	}
	return objects, err
}
