package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// uninstallAnnotation is set on the kubeconfig Secret once an uninstallation is prepared. Its value is an
	// uninstallState.
	uninstallAnnotation = "towline.dev/departing"
	// answerTimeout is how long an uninstallation waits for a hub that does not accept the answer. Without the answer
	// the hub would wait for the agent.
	answerTimeout = 10 * time.Minute
)

// Errors of an uninstallation.
var (
	errUninstallRequested = errors.New("the hub requests the removal of the agent")
	errUninstalled        = errors.New("the agent has uninstalled itself")
	errOtherCluster       = errors.New("the hub has another SveltosCluster with this name")
)

// uninstallState is the value of uninstallAnnotation, in JSON.
type uninstallState struct {
	// Cluster is the UID of the SveltosCluster whose removal was requested.
	Cluster types.UID `json:"cluster"`
	// Credential is a hash of the Secret's data at that time. Other data belongs to a later registration, which must
	// stay.
	Credential string `json:"credential"`
	// Since is the time of the request.
	Since time.Time `json:"since"`
}

// isUninstallRequested returns true if cluster has the hub's removal request, which is valid only while the
// SveltosCluster is being deleted.
func isUninstallRequested(cluster *libv1beta1.SveltosCluster) bool {
	return cluster.DeletionTimestamp != nil && cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
}

// uninstall removes the agent if the hub still requests that. After a restart, finishUninstall continues from the
// uninstallState.
func (a *agent) uninstall(ctx context.Context, hub client.Client) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.clusterKey(), err)
	}
	if !isUninstallRequested(cluster) {
		return fmt.Errorf("the SveltosCluster %s was replaced before its agent was removed", a.clusterKey())
	}
	log.FromContext(ctx).Info("the cluster is being deregistered; uninstalling the agent", "cluster", a.clusterKey().String())
	state, err := a.uninstaller.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.finishUninstall(ctx, state)
}

// finishUninstall answers the hub and then removes the agent. It returns errUninstalled after that.
func (a *agent) finishUninstall(ctx context.Context, state *uninstallState) error {
	err := a.answerHub(ctx, state)
	switch {
	case errors.Is(err, errOtherCluster):
		return errors.Join(err, a.uninstaller.rollBack(ctx))
	case err != nil && a.opts.Clock.Since(state.Since) < answerTimeout:
		return err
	case err != nil:
		log.FromContext(ctx).Info("uninstalling the agent although the hub did not accept the answer", "reason", err.Error())
	}
	return a.uninstaller.remove(ctx)
}

// answerHub answers the removal request. A hub that knows neither the SveltosCluster nor the credential needs no
// answer.
func (a *agent) answerHub(ctx context.Context, state *uninstallState) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	credential, err := a.openCredential(ctx)
	if err != nil {
		return err
	}
	hub, err := newHubClient(credential.Config())
	if err != nil {
		return err
	}
	err = a.writeAnswer(ctx, hub, state)
	if apierrors.IsNotFound(err) || apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) {
		return nil
	}
	return err
}

// writeAnswer sets status.agentRemovedAt of the SveltosCluster.
func (a *agent) writeAnswer(ctx context.Context, hub client.Client, state *uninstallState) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.clusterKey(), err)
	}
	if cluster.UID != state.Cluster {
		return errOtherCluster
	}
	if cluster.Status.AgentRemovedAt != nil {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": cluster.ResourceVersion},
		"status":   map[string]any{"agentRemovedAt": metav1.NewTime(a.opts.Clock.Now())},
	})
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	if err := hub.Status().Patch(ctx, cluster, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("answer on SveltosCluster %s: %w", a.clusterKey(), err)
	}
	return nil
}
