package register

import (
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/rollback"
)

// The names of the objects of a registration on the cluster. They are the same as in Karmada.
const (
	// KubeconfigSecret is the Secret with the agent's kubeconfig for the control plane, under the key KubeconfigKey.
	KubeconfigSecret = "karmada-kubeconfig"
	// KubeconfigKey is the key of the kubeconfig in the Secret.
	KubeconfigKey = "karmada-kubeconfig"
	// AgentServiceAccount is the agent's ServiceAccount.
	AgentServiceAccount = "karmada-agent-sa"
	// agentRole is the ClusterRole and the ClusterRoleBinding of an agent in DefaultNamespace.
	agentRole = "karmada-agent"
)

// AgentRole returns the name of the ClusterRole and the ClusterRoleBinding of the agent in a namespace. The ClusterRole
// owns the other objects of the registration, so that its deletion deletes them all.
func AgentRole(namespace string) string {
	if namespace == DefaultNamespace {
		return agentRole
	}
	return agentRole + ":" + namespace
}

const (
	// RegistrationLabel on an object of the cluster is the name of the Cluster whose registration made it.
	RegistrationLabel = "towline.dev/registration"
	// unfinishedAnnotation on the ClusterRole marks a registration that is not complete. The next run resumes it.
	unfinishedAnnotation = "towline.dev/registration-unfinished"
	// certificateAnnotation on the Secret and on the pods is the name of the CertificateSigningRequest of the
	// certificate, so that a new certificate restarts the pods.
	certificateAnnotation = "towline.dev/certificate"

	appLabel               = "app"
	appLabelValue          = "karmada-agent"
	agentContainer         = "karmada-agent"
	secretFlag             = "--karmada-kubeconfig-secret="
	clusterFlag            = "--cluster-name="
	inventoryNamespaceFlag = "--cluster-namespace="
	kubeconfigClusterName  = "karmada-apiserver"
)

// manifest has the inputs of the objects of one registration. Its methods return the objects.
type manifest struct {
	request Request
	attempt string
	// memberServer is the URL of the cluster's API server.
	memberServer string
	// csr is the name of the CertificateSigningRequest of the kubeconfig's certificate.
	csr        string
	kubeconfig []byte
	// owner refers to the ClusterRole.
	owner metav1.OwnerReference
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

func (m manifest) namespace() *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: m.objectMeta("", m.request.Namespace)}
}

// secret returns the Secret with the kubeconfig.
func (m manifest) secret() client.Object {
	secret := &corev1.Secret{
		ObjectMeta: m.ownedMeta(m.request.Namespace, KubeconfigSecret),
		Type:       corev1.SecretTypeOpaque,
		Data:       map[string][]byte{KubeconfigKey: m.kubeconfig},
	}
	secret.Annotations[certificateAnnotation] = m.csr
	return secret
}

func (m manifest) serviceAccount() client.Object {
	return &corev1.ServiceAccount{ObjectMeta: m.ownedMeta(m.request.Namespace, AgentServiceAccount)}
}

// clusterRole gives the agent all permissions: the control plane may deploy objects of any kind. It is written first,
// and marks the registration as unfinished.
func (m manifest) clusterRole() client.Object {
	role := &rbacv1.ClusterRole{
		ObjectMeta: m.objectMeta("", AgentRole(m.request.Namespace)),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}},
			{NonResourceURLs: []string{"*"}, Verbs: []string{"get"}},
		},
	}
	// A renewal is never unfinished: if it fails, the agent continues with its earlier certificate.
	if !m.request.Renew {
		role.Annotations[unfinishedAnnotation] = "true"
	}
	return role
}

func (m manifest) clusterRoleBinding() client.Object {
	name := AgentRole(m.request.Namespace)
	return &rbacv1.ClusterRoleBinding{
		ObjectMeta: m.ownedMeta("", name),
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: m.request.Namespace, Name: AgentServiceAccount}},
	}
}

func (m manifest) deployment() client.Object {
	labels := map[string]string{appLabel: appLabelValue}
	return &appsv1.Deployment{
		ObjectMeta: m.ownedMeta(m.request.Namespace, DefaultAgentDeployment),
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(m.request.Replicas),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			// A second agent would wait for the end of the first one.
			Strategy: appsv1.DeploymentStrategy{Type: appsv1.RecreateDeploymentStrategyType},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels, Annotations: map[string]string{certificateAnnotation: m.csr}},
				Spec: corev1.PodSpec{
					ServiceAccountName:            AgentServiceAccount,
					TerminationGracePeriodSeconds: ptr.To(int64(10)),
					Containers:                    []corev1.Container{m.container()},
					SecurityContext: &corev1.PodSecurityContext{
						RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
					},
					Tolerations: []corev1.Toleration{
						{Key: "node-role.kubernetes.io/master", Operator: corev1.TolerationOpExists},
						{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists},
					},
				},
			},
		},
	}
}

func (m manifest) container() corev1.Container {
	return corev1.Container{
		Name:    agentContainer,
		Image:   m.request.Image,
		Command: append([]string{"/bin/karmada-agent"}, m.arguments()...),
		Ports: []corev1.ContainerPort{
			{Name: "metrics", ContainerPort: 8080, Protocol: corev1.ProtocolTCP},
			{Name: "healthz", ContainerPort: 10357, Protocol: corev1.ProtocolTCP},
		},
		LivenessProbe:  probe("/healthz", 15, 20),
		ReadinessProbe: probe("/readyz", 2, 5),
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
		},
		SecurityContext: &corev1.SecurityContext{
			AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		},
		// With it the pod status has the end of the agent's log, which Register reports as the reason.
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
	}
}

func probe(path string, delay, period int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler:        corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromString("healthz")}},
		InitialDelaySeconds: delay, PeriodSeconds: period,
	}
}

// arguments are the command line of the agent, without flags that have no value.
func (m manifest) arguments() []string {
	r := m.request
	controllers := "*"
	if !r.EnableCertRotation {
		controllers = "*,-certRotation"
	}
	args := []string{secretFlag + r.Namespace + "/" + KubeconfigSecret, clusterFlag + r.ClusterName}
	for _, given := range []struct{ flag, value string }{
		{"--cluster-api-endpoint=", m.memberServer},
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

// objectMeta is the metadata of an object of this registration.
func (m manifest) objectMeta(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", RegistrationLabel: m.request.ClusterName},
		Annotations: map[string]string{rollback.AttemptAnnotation: m.attempt},
	}
}

// ownedMeta is objectMeta with the ClusterRole as the owner.
func (m manifest) ownedMeta(namespace, name string) metav1.ObjectMeta {
	meta := m.objectMeta(namespace, name)
	meta.OwnerReferences = []metav1.OwnerReference{m.owner}
	return meta
}
