package agent

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent/session"
)

// uninstall removes the agent if the hub still requests that. After a restart, finishUninstall continues from the
// UninstallState.
func (a *agent) uninstall(ctx context.Context, hub client.Client) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.clusterKey(), err)
	}
	if !session.IsUninstallRequested(cluster) {
		return fmt.Errorf("the SveltosCluster %s was replaced before its agent was removed", a.clusterKey())
	}
	log.FromContext(ctx).Info("the cluster is being deregistered; uninstalling the agent", "cluster", a.clusterKey().String())
	state, err := a.uninstaller.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.finishUninstall(ctx, state)
}

// finishUninstall answers the hub, removes the agent, and returns session.ErrUninstalled. If the hub has another
// cluster of this name now, it rolls the uninstallation back instead.
func (a *agent) finishUninstall(ctx context.Context, state *session.UninstallState) error {
	u := session.Uninstallation{Clock: a.opts.Clock, Answer: a.answerHub, RollBack: a.uninstaller.rollBack, Remove: a.uninstaller.remove}
	return u.Finish(ctx, state)
}

// answerHub sends the answer to the removal request. A hub that no longer knows the SveltosCluster, or does not accept
// the credential, needs no answer.
func (a *agent) answerHub(ctx context.Context, state *session.UninstallState) error {
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

// writeAnswer sets the answer, status.agentRemovedAt of the SveltosCluster.
func (a *agent) writeAnswer(ctx context.Context, hub client.Client, state *session.UninstallState) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.clusterKey(), err)
	}
	if cluster.UID != state.ClusterUID {
		return session.ErrOtherCluster
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
