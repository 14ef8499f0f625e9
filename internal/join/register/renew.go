package register

import (
	"context"
	"encoding/json"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
)

// renewAgent writes the new kubeconfig to the Secret of the existing agent, and restarts its pods. It changes nothing
// else: the options of the agent stay.
func (g *registration) renewAgent(ctx context.Context) error {
	g.request.Out(lineObjects)
	key := g.existing.secretKey()
	input := manifestInput{request: g.request, attempt: g.writer.Attempt()}
	secret := &corev1.Secret{ObjectMeta: input.objectMeta(key.Namespace, key.Name), Data: map[string][]byte{KubeconfigKey: g.kubeconfig}}
	secret.Annotations[certificateAnnotation] = g.csr
	if g.existing.secret != nil {
		secret.OwnerReferences = g.existing.secret.OwnerReferences
	} else if g.existing.role != nil {
		secret.OwnerReferences = []metav1.OwnerReference{join.ClusterRoleOwner(g.existing.role)}
	}
	if _, err := g.applyObject(ctx, secret); err != nil {
		return err
	}
	g.request.Out(lineDeployment)
	return g.restartPods(ctx)
}

// restartPods writes the name of the CertificateSigningRequest to the pod template of the existing Deployment. The
// rollback restores the annotation, unless another client has changed it since.
func (g *registration) restartPods(ctx context.Context) error {
	var previous any // null in JSON if the annotation does not exist
	if csr, exists := g.existing.deployment.Spec.Template.Annotations[certificateAnnotation]; exists {
		previous = csr
	}
	g.writer.AddUndo(func(ctx context.Context) error {
		live := &appsv1.Deployment{}
		found, err := g.member.get(ctx, client.ObjectKeyFromObject(g.existing.deployment), live)
		if err != nil || !found || live.Spec.Template.Annotations[certificateAnnotation] != g.csr {
			return err
		}
		return g.patchPodTemplate(ctx, previous)
	})
	return g.patchPodTemplate(ctx, g.csr)
}

func (g *registration) patchPodTemplate(ctx context.Context, csr any) error {
	existing := g.existing.deployment
	annotations := map[string]any{"metadata": map[string]any{"annotations": map[string]any{certificateAnnotation: csr}}}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": existing.UID}, // a Deployment that was created again is not changed
		"spec":     map[string]any{"template": annotations},
	})
	if err != nil {
		return fmt.Errorf("encode the patch of the agent's Deployment: %w", err)
	}
	err = g.member.Patch(ctx, existing.DeepCopy(), client.RawPatch(types.MergePatchType, patch), client.FieldOwner(kube.FieldManager))
	if err != nil {
		return fmt.Errorf("restart the pods of Deployment %s/%s on the cluster: %w", existing.Namespace, existing.Name, err)
	}
	return nil
}
