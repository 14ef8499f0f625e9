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

// tellPatience is how long a leaving agent waits for a hub that does not answer, so that nobody there waits for an
// agent that is gone.
const tellPatience = 10 * time.Minute

// errReplaced says that the cluster object on the hub is another one than the one that the agent was ordered to leave.
var errReplaced = errors.New("the hub has another cluster object of that name")

// ordered says whether cluster carries the hub's order to remove the agent, which counts only while the cluster is
// being deleted.
func ordered(cluster *libv1beta1.SveltosCluster) bool {
	return cluster.DeletionTimestamp != nil && cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
}

// depart removes the agent, if the hub still orders that. From here on a restart goes on with it by the mark.
func (a *agent) depart(ctx context.Context, hub client.Client) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.cluster(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.cluster(), err)
	}
	if !ordered(cluster) {
		return fmt.Errorf("SveltosCluster %s was replaced while its agent was to leave", a.cluster())
	}
	log.FromContext(ctx).Info("the cluster is being deregistered: the agent removes itself", "cluster", a.cluster().String())
	m, err := a.departure.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.leave(ctx, m)
}

// leave tells the hub that the agent is as good as gone, and removes it. It returns errDeparted when it is.
func (a *agent) leave(ctx context.Context, m *mark) error {
	err := a.tell(ctx, m)
	switch {
	case errors.Is(err, errReplaced):
		return errors.Join(err, a.departure.stay(ctx))
	case err != nil && a.opts.Clock.Since(m.Since) < tellPatience:
		return err
	case err != nil:
		log.FromContext(ctx).Info("leaving without the hub's knowledge", "reason", err.Error())
	}
	return a.departure.remove(ctx)
}

// tell writes status.agentRemovedAt. A hub that does not know the cluster or its credential any more needs no telling.
func (a *agent) tell(ctx context.Context, m *mark) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	credential, err := a.openCredential(ctx)
	if err != nil {
		return err
	}
	hub, err := newHubClient(credential.Config())
	if err != nil {
		return err
	}
	err = a.tellHub(ctx, hub, m)
	if apierrors.IsNotFound(err) || apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) {
		return nil
	}
	return err
}

func (a *agent) tellHub(ctx context.Context, hub client.Client, m *mark) error {
	cluster := &libv1beta1.SveltosCluster{}
	if err := hub.Get(ctx, a.cluster(), cluster); err != nil {
		return fmt.Errorf("read SveltosCluster %s: %w", a.cluster(), err)
	}
	if cluster.UID != m.Cluster {
		return errReplaced
	}
	if cluster.Status.AgentRemovedAt != nil {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": cluster.ResourceVersion},
		"status":   map[string]any{"agentRemovedAt": metav1.NewTime(a.opts.Clock.Now())},
	})
	if err != nil {
		return fmt.Errorf("encode report: %w", err)
	}
	if err := hub.Status().Patch(ctx, cluster, client.RawPatch(types.MergePatchType, patch)); err != nil {
		return fmt.Errorf("report on SveltosCluster %s: %w", a.cluster(), err)
	}
	return nil
}
