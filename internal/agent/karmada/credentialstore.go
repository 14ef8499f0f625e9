package karmada

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
)

// lifetimeAnnotation has the lifetime that was requested for a certificate, and the ID of this certificate. The next
// renewal requests the same lifetime. The certificate alone does not show it, because signers backdate certificates.
const lifetimeAnnotation = "towline.dev/certificate-life"

// errReplaced ends a session because the stored kubeconfig is not the one in use: the cluster was registered again, or
// another agent has renewed the certificate.
var errReplaced = errors.New("the kubeconfig of the hub was replaced")

// agentState is kept on the member, so that an agent that starts without the hub can start the engine.
type agentState struct {
	// clusterUID is the UID of the Cluster, and hubID the ID of the hub; empty before the first connection.
	clusterUID, hubID string
	// lifetime is the value of lifetimeAnnotation.
	lifetime string
}

func (s agentState) annotations() map[string]string {
	return map[string]string{kube.AnnotationScope: s.clusterUID, kube.AnnotationHub: s.hubID, lifetimeAnnotation: s.lifetime}
}

func stateFromAnnotations(annotations map[string]string) agentState {
	return agentState{clusterUID: annotations[kube.AnnotationScope], hubID: annotations[kube.AnnotationHub], lifetime: annotations[lifetimeAnnotation]}
}

// credentialStore stores the kubeconfig of the hub, and the agentState.
type credentialStore interface {
	// read returns the stored kubeconfig and state. Without a stored state it returns a zero agentState.
	read(ctx context.Context) (kubeconfig []byte, state agentState, err error)
	// replace replaces the stored kubeconfig used by renewed, and stores state. It returns errReplaced, and stores
	// nothing, if used is not the stored kubeconfig.
	replace(ctx context.Context, used, renewed []byte, state agentState) error
	saveState(ctx context.Context, state agentState) error
}

// secretStore is a credentialStore in a Secret of the member.
type secretStore struct {
	member    kubernetes.Interface
	namespace string
	name      string
}

func (s secretStore) read(ctx context.Context) ([]byte, agentState, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	secret, err := s.member.CoreV1().Secrets(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	if err != nil {
		return nil, agentState{}, fmt.Errorf("read the kubeconfig of the hub in Secret %s/%s: %w", s.namespace, s.name, err)
	}
	return secret.Data[register.KubeconfigKey], stateFromAnnotations(secret.Annotations), nil
}

func (s secretStore) replace(ctx context.Context, used, renewed []byte, state agentState) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	secret, err := s.member.CoreV1().Secrets(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read the kubeconfig of the hub in Secret %s/%s: %w", s.namespace, s.name, err)
	}
	if !bytes.Equal(secret.Data[register.KubeconfigKey], used) {
		return errReplaced
	}
	err = s.patch(ctx, map[string]any{
		"metadata": map[string]any{"resourceVersion": secret.ResourceVersion, "annotations": state.annotations()},
		"data":     map[string][]byte{register.KubeconfigKey: renewed},
	})
	if err != nil {
		return fmt.Errorf("store the renewed certificate in Secret %s/%s: %w", s.namespace, s.name, err)
	}
	return nil
}

func (s secretStore) saveState(ctx context.Context, state agentState) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := s.patch(ctx, map[string]any{"metadata": map[string]any{"annotations": state.annotations()}}); err != nil {
		return fmt.Errorf("store the agent's state in Secret %s/%s: %w", s.namespace, s.name, err)
	}
	return nil
}

func (s secretStore) patch(ctx context.Context, content map[string]any) error {
	body, err := json.Marshal(content)
	if err != nil {
		return err
	}
	_, err = s.member.CoreV1().Secrets(s.namespace).Patch(ctx, s.name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
	return err
}

// fileStore is a credentialStore for an agent that runs outside the member: the kubeconfig is in a file, the state in a
// ConfigMap of the member.
type fileStore struct {
	member kubernetes.Interface
	path   string
	// namespace and name identify the ConfigMap. cluster is the name of the Cluster, for its label.
	namespace string
	name      string
	cluster   string
}

func (s fileStore) read(ctx context.Context) ([]byte, agentState, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	kubeconfig, err := os.ReadFile(s.path)
	if err != nil {
		return nil, agentState{}, fmt.Errorf("read the kubeconfig of the hub: %w", err)
	}
	configMap, err := s.member.CoreV1().ConfigMaps(s.namespace).Get(ctx, s.name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, agentState{}, fmt.Errorf("read ConfigMap %s/%s: %w", s.namespace, s.name, err)
	}
	return kubeconfig, stateFromAnnotations(configMap.Annotations), nil
}

func (s fileStore) replace(ctx context.Context, used, renewed []byte, state agentState) error {
	stored, err := os.ReadFile(s.path)
	if err != nil {
		return fmt.Errorf("read the kubeconfig of the hub: %w", err)
	}
	if !bytes.Equal(stored, used) {
		return errReplaced
	}
	if err := replaceFile(s.path, renewed); err != nil {
		return fmt.Errorf("store the renewed certificate: %w", err)
	}
	return s.saveState(ctx, state)
}

// replaceFile replaces a file atomically.
func replaceFile(path string, content []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), ".kubeconfig-*") // only its owner may read it
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(content)
	if err = errors.Join(err, file.Sync(), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}

func (s fileStore) saveState(ctx context.Context, state agentState) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	configMaps := s.member.CoreV1().ConfigMaps(s.namespace)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": state.annotations()}})
	if err != nil {
		return err
	}
	_, err = configMaps.Patch(ctx, s.name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if apierrors.IsNotFound(err) {
		if err := ensureNamespace(ctx, s.member, s.namespace); err != nil {
			return err
		}
		_, err = configMaps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Name: s.name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: s.cluster}, Annotations: state.annotations(),
		}}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return fmt.Errorf("store the agent's state in ConfigMap %s/%s: %w", s.namespace, s.name, err)
	}
	return nil
}

// ensureNamespace creates a namespace on the member unless it exists.
func ensureNamespace(ctx context.Context, member kubernetes.Interface, name string) error {
	_, err := member.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = member.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"},
		}}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("create namespace %s: %w", name, err)
	}
	return nil
}

// newCredentialStore returns a secretStore for HubSecret, or a fileStore for HubKubeconfig.
func newCredentialStore(member kubernetes.Interface, o Options) credentialStore {
	if o.HubSecret == "" {
		return fileStore{member: member, path: o.HubKubeconfig, namespace: o.ElectNamespace, name: electionName(o.Cluster), cluster: o.Cluster}
	}
	namespace, name, _ := strings.Cut(o.HubSecret, "/")
	return secretStore{member: member, namespace: namespace, name: name}
}
