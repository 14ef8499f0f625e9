package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// watchPause is the time between two looks at a cluster that is to become ready.
const watchPause = 500 * time.Millisecond

// watcher waits until a registered cluster is ready.
type watcher struct {
	hub     client.Client
	member  client.Client
	request ApplyRequest
	// beat is the last heartbeat of an agent before the manifest was applied.
	beat *metav1.MicroTime
	said string
}

func newWatcher(hub *rest.Config, member client.Client, r ApplyRequest) (*watcher, error) {
	hubClient, err := newHubClient(hub)
	if err != nil {
		return nil, err
	}
	return &watcher{hub: hubClient, member: member, request: r}, nil
}

// remember notes the last heartbeat.
func (w *watcher) remember(ctx context.Context) error {
	cluster, err := w.cluster(ctx)
	if err != nil {
		return err
	}
	w.beat, err = w.lastBeat(ctx, cluster)
	return err
}

func (w *watcher) cluster(ctx context.Context) (*libv1beta1.SveltosCluster, error) {
	cluster := &libv1beta1.SveltosCluster{}
	if err := w.hub.Get(ctx, client.ObjectKey{Namespace: w.request.Namespace, Name: w.request.Name}, cluster); err != nil {
		return nil, fmt.Errorf("read SveltosCluster %s: %w", w.request.key(), err)
	}
	return cluster, nil
}

func (w *watcher) lastBeat(ctx context.Context, cluster *libv1beta1.SveltosCluster) (*metav1.MicroTime, error) {
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: deliveryNamespace(cluster), Name: cluster.Name}
	if err := w.hub.Get(ctx, key, lease); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read Lease %s: %w", key, err)
	}
	return lease.Spec.RenewTime, nil
}

// await waits until the hub says that the cluster is ready and the agent on it is the one that was applied.
func (w *watcher) await(ctx context.Context) (version string, err error) {
	limited, cancel := context.WithTimeout(ctx, w.request.Wait)
	defer cancel()
	state := "nothing is known of it"
	err = wait.PollUntilContextCancel(limited, watchPause, true, func(context.Context) (bool, error) {
		// Not limited by the wait, so that the last look shows what there is and not that time is up.
		look := w.look(ctx)
		if err := ctx.Err(); err != nil {
			return false, err
		}
		state, version = look.text, look.version
		w.tell(state)
		return look.ready, nil
	})
	switch {
	case err == nil:
		return version, nil
	case ctx.Err() != nil:
		return "", fmt.Errorf("%w yet: %s; to wait on, run the same command again: %w", ErrNotReady, state, ctx.Err())
	case errors.Is(err, context.DeadlineExceeded):
		return "", fmt.Errorf("%w after %s: %s; when the reason is gone, run the same command again", ErrNotReady, w.request.Wait, state)
	}
	return "", err
}

// awaitLeaving waits until nothing is left of an agent that is being removed from the member. That takes from the time
// to wait.
func (w *watcher) awaitLeaving(ctx context.Context, a *application) error {
	limited, cancel := context.WithTimeout(ctx, w.request.Wait)
	defer cancel()
	begun, what := time.Now(), ""
	err := wait.PollUntilContextCancel(limited, watchPause, true, func(context.Context) (gone bool, err error) {
		// Not limited by the wait, so that there is always one look.
		if what, err = a.leaving(ctx); err != nil || what == "" {
			return err == nil, err
		}
		w.tell("a former agent is still being removed from it: " + what)
		return false, nil
	})
	if w.said != "" {
		w.request.Wait = max(w.request.Wait-time.Since(begun), 0).Round(time.Second)
	}
	if wait.Interrupted(err) && ctx.Err() == nil {
		return fmt.Errorf("%w: %s; try again when it is gone", errStillLeaving, what)
	}
	return err
}

func (w *watcher) tell(what string) {
	if w.request.Progress != nil && what != w.said {
		w.request.Progress(what)
	}
	w.said = what
}

// sight is what one look at hub and member shows.
type sight struct {
	ready   bool
	version string
	text    string
}

// look looks at hub and member. What cannot be read is said and looked at again, since either may be away for a moment.
func (w *watcher) look(ctx context.Context) sight {
	ctx, cancel := context.WithTimeout(ctx, reachLimit)
	defer cancel()
	agent, err := lookAtAgent(ctx, w.member)
	if err != nil {
		agent = agentSight{text: err.Error()}
	}
	cluster, err := w.cluster(ctx)
	if err != nil {
		return sight{text: "agent: " + agent.text + "; hub: " + err.Error()}
	}
	beat, err := w.lastBeat(ctx, cluster)
	if err != nil {
		return sight{text: "agent: " + agent.text + "; hub: " + err.Error()}
	}
	connected := beat != nil && !beat.Equal(w.beat)
	s := sight{text: "agent: " + agent.text + "; hub: " + w.hubText(cluster, connected), version: cluster.Status.Version}
	s.ready = agent.rolledOut && connected && cluster.Status.Ready && cluster.Status.ConnectionStatus == libv1beta1.ConnectionHealthy
	return s
}

// hubText says what the hub knows of a cluster, connected meaning that the agent that was applied has been heard of.
func (w *watcher) hubText(cluster *libv1beta1.SveltosCluster, connected bool) string {
	status := cluster.Status
	switch {
	case !connected && status.FailureMessage != "":
		return "the agent has not connected yet (" + status.FailureMessage + ")"
	case !connected && w.beat != nil:
		return "the agent has not connected with its new token yet"
	case !connected:
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
