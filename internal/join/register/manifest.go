package register

import (
	_ "embed" // for agent.yaml
	"fmt"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/rollback"
)

// The names of the objects on the cluster, the same as in Karmada.
const (
	// KubeconfigSecret is the Secret with the agent's kubeconfig for the control plane.
	KubeconfigSecret = "karmada-kubeconfig"
	// KubeconfigKey is the key of the kubeconfig in that Secret.
	KubeconfigKey = "karmada-kubeconfig"
	// AgentServiceAccount is the agent's ServiceAccount.
	AgentServiceAccount = "karmada-agent-sa"
	// agentRole is the ClusterRole and the ClusterRoleBinding of an agent in DefaultNamespace.
	agentRole = "karmada-agent"
)

// AgentRole returns the name of the ClusterRole and the ClusterRoleBinding of the agent in a namespace. The ClusterRole
// owns the other objects of the registration.
func AgentRole(namespace string) string {
	if namespace == DefaultNamespace {
		return agentRole
	}
	return agentRole + ":" + namespace
}

const (
	// RegistrationLabel on an object of the cluster is the name of the Cluster whose registration created it.
	RegistrationLabel = "towline.dev/registration"
	// unfinishedAnnotation on the ClusterRole marks a registration that is not finished. The next run resumes it.
	unfinishedAnnotation = "towline.dev/registration-unfinished"
	// certificateAnnotation on the Secret and on the pods is the name of the CertificateSigningRequest. So a new
	// certificate restarts the pods.
	certificateAnnotation = "towline.dev/certificate"

	appLabel               = "app"
	appLabelValue          = "karmada-agent"
	secretFlag             = "--karmada-kubeconfig-secret="
	clusterFlag            = "--cluster-name="
	inventoryNamespaceFlag = "--cluster-namespace="
	kubeconfigClusterName  = "karmada-apiserver"
)

// manifestInput is the input for the objects of one registration.
type manifestInput struct {
	request Request
	// attempt is the uid of this run.
	attempt string
	// memberServer is the URL of the cluster's API server.
	memberServer string
	// csr is the name of the CertificateSigningRequest of the certificate in kubeconfig.
	csr        string
	kubeconfig []byte
}

// encodeKubeconfig returns the agent's kubeconfig for the control plane.
func encodeKubeconfig(cluster, endpoint string, ca, cert, key []byte) ([]byte, error) {
	config := clientcmdapi.NewConfig()
	name := cluster + "@" + kubeconfigClusterName
	config.Clusters[kubeconfigClusterName] = &clientcmdapi.Cluster{Server: "https://" + endpoint, CertificateAuthorityData: ca}
	config.AuthInfos[cluster] = &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: kubeconfigClusterName, AuthInfo: cluster}
	config.CurrentContext = name
	out, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's kubeconfig: %w", err)
	}
	return out, nil
}

func (i manifestInput) namespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: i.objectMeta("", i.request.Namespace)}
}

//go:embed agent.yaml
var agentYAML string

// objects returns the objects of agent.yaml, the ClusterRole first and the Deployment last. It replaces the labels in
// agent.yaml by the labels of objectMeta, and adds the annotations of objectMeta.
func (i manifestInput) objects() ([]*unstructured.Unstructured, error) {
	objects, err := join.RenderManifest(agentYAML, map[string]any{
		"Namespace": i.request.Namespace, "Role": AgentRole(i.request.Namespace), "CSR": i.csr, "Kubeconfig": i.kubeconfig,
		"Image": i.request.Image, "Replicas": i.request.Replicas, "Command": append([]string{"/bin/karmada-agent"}, i.arguments()...),
	})
	if err != nil {
		return nil, err
	}
	for _, obj := range objects {
		meta := i.objectMeta("", "")
		maps.Copy(meta.Annotations, obj.GetAnnotations())
		obj.SetLabels(meta.Labels)
		obj.SetAnnotations(meta.Annotations)
	}
	objects[0].SetAnnotations(map[string]string{rollback.AttemptAnnotation: i.attempt, unfinishedAnnotation: "true"})
	return objects, nil
}

// arguments returns the command-line flags of the agent that have a value.
func (i manifestInput) arguments() []string {
	r := i.request
	controllers := "*"
	if !r.EnableCertRotation {
		controllers = "*,-certRotation"
	}
	args := []string{secretFlag + r.Namespace + "/" + KubeconfigSecret, clusterFlag + r.ClusterName}
	for _, given := range []struct{ flag, value string }{
		{"--cluster-api-endpoint=", i.memberServer},
		{"--cluster-provider=", r.Provider},
		{"--cluster-region=", r.Region},
		{"--cluster-zones=", strings.Join(r.Zones, ",")},
		{"--proxy-server-address=", r.ProxyServerAddress},
		{"--controllers=", controllers},
		{"--leader-elect-resource-namespace=", r.Namespace},
		{inventoryNamespaceFlag, r.ClusterNamespace},
		{"--cluster-status-update-frequency=", "10s"},
		{"--metrics-bind-address=", ":8080"},
		{"--health-probe-bind-address=", "0.0.0.0:10357"},
		{"--v=", "2"},
	} {
		if given.value != "" {
			args = append(args, given.flag+given.value)
		}
	}
	return args
}

// objectMeta returns metadata with the labels and annotations of all objects of this registration.
func (i manifestInput) objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", RegistrationLabel: i.request.ClusterName},
		Annotations: map[string]string{rollback.AttemptAnnotation: i.attempt},
	}
}
