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

// lifeAnnotation says which life to ask for when the certificate is renewed, and for which certificate that holds: signers date certificates
// back, so that the certificate does not tell it.
const lifeAnnotation = "towline.dev/certificate-life"

// errReplaced says that there is another way to the hub than the one in use: the cluster was registered again, or its credential renewed.
var errReplaced = errors.New("the way to the hub was replaced")

// memory is what the agent must know for a start while the hub is away.
type memory struct {
	// scope is the uid of the Cluster, hub that of the hub; empty before the first contact.
	scope, hub string
	// life is the value of lifeAnnotation.
	life string
}

func (m memory) annotations() map[string]string {
	return map[string]string{kube.AnnotationScope: m.scope, kube.AnnotationHub: m.hub, lifeAnnotation: m.life}
}

func remembered(annotations map[string]string) memory {
	return memory{scope: annotations[kube.AnnotationScope], hub: annotations[kube.AnnotationHub], life: annotations[lifeAnnotation]}
}

// home keeps the way to the hub, and the memory.
type home interface {
	// read returns both.
	read(ctx context.Context) (kubeconfig []byte, m memory, err error)
	// renew puts a kubeconfig into the place of the one in use. It returns errReplaced if there is another one meanwhile.
	renew(ctx context.Context, used, renewed []byte, m memory) error
	// remember keeps the memory.
	remember(ctx context.Context, m memory) error
}

// secretHome is a home in a Secret of the member.
type secretHome struct {
	member    kubernetes.Interface
	namespace string
	name      string
}

func (h secretHome) read(ctx context.Context) ([]byte, memory, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	secret, err := h.member.CoreV1().Secrets(h.namespace).Get(ctx, h.name, metav1.GetOptions{})
	if err != nil {
		return nil, memory{}, fmt.Errorf("read Secret %s/%s with the way to the hub: %w", h.namespace, h.name, err)
	}
	return secret.Data[register.KubeconfigKey], remembered(secret.Annotations), nil
}

func (h secretHome) renew(ctx context.Context, used, renewed []byte, m memory) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	secret, err := h.member.CoreV1().Secrets(h.namespace).Get(ctx, h.name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read Secret %s/%s with the way to the hub: %w", h.namespace, h.name, err)
	}
	if !bytes.Equal(secret.Data[register.KubeconfigKey], used) {
		return errReplaced
	}
	err = h.patch(ctx, map[string]any{
		"metadata": map[string]any{"resourceVersion": secret.ResourceVersion, "annotations": m.annotations()},
		"data":     map[string][]byte{register.KubeconfigKey: renewed},
	})
	if err != nil {
		return fmt.Errorf("keep the renewed certificate in Secret %s/%s: %w", h.namespace, h.name, err)
	}
	return nil
}

func (h secretHome) remember(ctx context.Context, m memory) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if err := h.patch(ctx, map[string]any{"metadata": map[string]any{"annotations": m.annotations()}}); err != nil {
		return fmt.Errorf("remember the Cluster on Secret %s/%s: %w", h.namespace, h.name, err)
	}
	return nil
}

func (h secretHome) patch(ctx context.Context, content map[string]any) error {
	body, err := json.Marshal(content)
	if err != nil {
		return err
	}
	_, err = h.member.CoreV1().Secrets(h.namespace).Patch(ctx, h.name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: kube.FieldManager})
	return err
}

// fileHome is a home in a file, for an agent that runs elsewhere. What it remembers is in a ConfigMap of the member.
type fileHome struct {
	member    kubernetes.Interface
	path      string
	namespace string
	name      string
	cluster   string
}

func (h fileHome) read(ctx context.Context) ([]byte, memory, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	kubeconfig, err := os.ReadFile(h.path)
	if err != nil {
		return nil, memory{}, fmt.Errorf("read the way to the hub: %w", err)
	}
	kept, err := h.member.CoreV1().ConfigMaps(h.namespace).Get(ctx, h.name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, memory{}, fmt.Errorf("read ConfigMap %s/%s: %w", h.namespace, h.name, err)
	}
	return kubeconfig, remembered(kept.Annotations), nil
}

func (h fileHome) renew(ctx context.Context, used, renewed []byte, m memory) error {
	present, err := os.ReadFile(h.path)
	if err != nil {
		return fmt.Errorf("read the way to the hub: %w", err)
	}
	if !bytes.Equal(present, used) {
		return errReplaced
	}
	if err := replaceFile(h.path, renewed); err != nil {
		return fmt.Errorf("keep the renewed certificate: %w", err)
	}
	return h.remember(ctx, m)
}

// replaceFile writes a file so that a reader finds the old content or the new one.
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

func (h fileHome) remember(ctx context.Context, m memory) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	maps := h.member.CoreV1().ConfigMaps(h.namespace)
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": m.annotations()}})
	if err != nil {
		return err
	}
	_, err = maps.Patch(ctx, h.name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: kube.FieldManager})
	if apierrors.IsNotFound(err) {
		if err := makeNamespace(ctx, h.member, h.namespace); err != nil {
			return err
		}
		_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Name: h.name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: h.cluster}, Annotations: m.annotations(),
		}}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil {
		return fmt.Errorf("remember the Cluster in ConfigMap %s/%s: %w", h.namespace, h.name, err)
	}
	return nil
}

// makeNamespace makes a namespace on the member unless it is there.
func makeNamespace(ctx context.Context, member kubernetes.Interface, name string) error {
	_, err := member.CoreV1().Namespaces().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = member.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true"},
		}}, metav1.CreateOptions{FieldManager: kube.FieldManager})
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make namespace %s: %w", name, err)
	}
	return nil
}

// newHome returns the home that o names.
func newHome(member kubernetes.Interface, o Options) home {
	if o.HubSecret == "" {
		return fileHome{member: member, path: o.HubKubeconfig, namespace: o.ElectNamespace, name: electionName(o.Cluster), cluster: o.Cluster}
	}
	namespace, name, _ := strings.Cut(o.HubSecret, "/")
	return secretHome{member: member, namespace: namespace, name: name}
}
