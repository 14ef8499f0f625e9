package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// readyPoll is the time between two reads of a cluster that is not ready yet.
const readyPoll = 500 * time.Millisecond

// errStillLeaving is returned if the objects of a former agent are not deleted in time.
var errStillLeaving = errors.New("a former agent is still being removed from the cluster")

// awaitRemoval waits until all objects of an agent that is being removed from the member are deleted. The time of that
// is part of the time to wait.
func (a *application) awaitRemoval(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, a.request.Wait)
	defer cancel()
	begun, leaving := time.Now(), ""
	err := wait.PollUntilContextCancel(limited, readyPoll, true, func(context.Context) (done bool, err error) {
		// Not limited by the wait, so that the objects are always read once.
		if leaving, err = a.findLeaving(ctx); err != nil || leaving == "" {
			return err == nil, err
		}
		a.report("a former agent is still being removed from it: " + leaving)
		return false, nil
	})
	if a.progress != "" {
		a.request.Wait = max(a.request.Wait-time.Since(begun), 0).Round(time.Second)
	}
	if wait.Interrupted(err) && ctx.Err() == nil {
		return fmt.Errorf("%w: %s; try again when it is gone", errStillLeaving, leaving)
	}
	return err
}

// readHeartbeat reads the last heartbeat of the agent.
func (a *application) readHeartbeat(ctx context.Context) (*metav1.MicroTime, error) {
	cluster, _, err := findCluster(ctx, a.hub, a.request.Request)
	if err != nil {
		return nil, err
	}
	lease := &coordinationv1.Lease{}
	_, err = read(ctx, a.hub, lease, client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: a.request.Name})
	return lease.Spec.RenewTime, err
}

// awaitReady waits until the cluster is ready and its agent is the one that was applied.
func (a *application) awaitReady(ctx context.Context) (version string, err error) {
	limited, cancel := context.WithTimeout(ctx, a.request.Wait)
	defer cancel()
	state := ""
	err = wait.PollUntilContextCancel(limited, readyPoll, true, func(context.Context) (bool, error) {
		// Not limited by the wait, so that the last state is one of the cluster and not that time is up.
		var isReady bool
		state, version, isReady = a.readState(ctx)
		if err := ctx.Err(); err != nil {
			return false, err
		}
		a.report(state)
		return isReady, nil
	})
	switch {
	case err == nil:
		return version, nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("%w yet: %s; to wait on, run the same command again: %w", ErrNotReady, state, ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return "", fmt.Errorf("%w after %s: %s; when the reason is gone, run the same command again", ErrNotReady, a.request.Wait, state)
	}
	return "", err
}

func (a *application) report(state string) {
	if a.request.Progress != nil && state != a.progress {
		a.request.Progress(state)
	}
	a.progress = state
}

// readState reads the state of agent and hub. Errors are part of the state, since either may be unavailable for a
// moment.
func (a *application) readState(ctx context.Context) (state, version string, isReady bool) {
	ctx, cancel := context.WithTimeout(ctx, accessTimeout)
	defer cancel()
	agent, isRolledOut, err := agentState(ctx, a.member)
	if err != nil {
		agent = err.Error()
	}
	cluster, _, err := findCluster(ctx, a.hub, a.request.Request)
	heartbeat, heartbeatErr := a.readHeartbeat(ctx)
	if err := errors.Join(err, heartbeatErr); err != nil {
		return "agent: " + agent + "; hub: " + err.Error(), "", false
	}
	isConnected := heartbeat != nil && !heartbeat.Equal(a.heartbeat)
	isReady = isRolledOut && isConnected && cluster.Status.Ready && cluster.Status.ConnectionStatus == libv1beta1.ConnectionHealthy
	return "agent: " + agent + "; hub: " + a.hubText(cluster, isConnected), cluster.Status.Version, isReady
}

// hubText describes the hub's state of a cluster. isConnected is true after a heartbeat of the agent that was applied.
func (a *application) hubText(cluster *libv1beta1.SveltosCluster, isConnected bool) string {
	status := cluster.Status
	switch {
	case !isConnected && status.FailureMessage != "":
		return "the agent has not connected yet (" + status.FailureMessage + ")"
	case !isConnected && a.heartbeat != nil:
		return "the agent has not connected with its new token yet"
	case !isConnected:
		return "the agent has not connected yet"
	case status.FailureMessage != "":
		return status.FailureMessage
	case !status.Ready:
		return "the agent is connected and has not reported the cluster yet"
	case status.ConnectionStatus != libv1beta1.ConnectionHealthy:
		return "the agent has reported; the hub has not noticed yet: is it running?"
	}
	return "ready"
}
