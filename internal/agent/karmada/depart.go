package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/kube"
)

const (
	// departingAnnotation on what the agent keeps on the member says that the hub ordered it to remove itself, and that everything is prepared.
	departingAnnotation = "towline.dev/departing"
	// orderDone is what the agent answers the order with, in kube.AnnotationAgentOrder on its Lease.
	orderDone = "removed"
	// tellPatience is how long a leaving agent waits for a hub that does not answer, so that nobody there waits for an agent that is gone.
	tellPatience = 10 * time.Minute
)

// Errors that end a session for good, or for a departure.
var (
	errOrdered   = errors.New("the hub orders the agent to remove itself")
	errDeparted  = errors.New("the agent has removed itself")
	errOtherUID  = errors.New("the hub has another Cluster of that name")
	errNotMarked = errors.New("the mark of the departure is gone")
)

// mark is the value of departingAnnotation, in JSON.
type mark struct {
	// Cluster is the uid of the Cluster that was deleted, with the order on it.
	Cluster types.UID `json:"cluster"`
	// Credential is a hash of the kubeconfig then. Another kubeconfig is that of a later registration, which nobody asked to remove.
	Credential string `json:"credential"`
	// Since is when the order was taken.
	Since time.Time `json:"since"`
}

// ordered says whether cluster carries the hub's order to remove the agent, which counts only while the Cluster is being deleted.
func ordered(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.DeletionTimestamp != nil && cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
}

// depart removes the agent, if the hub still orders that. From here on a restart goes on with it by the mark.
func (a *agent) depart(ctx context.Context, hub client.Client) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.cluster(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if !ordered(cluster) {
		return fmt.Errorf("the Cluster %s was replaced while its agent was to leave", a.opts.Cluster)
	}
	log.FromContext(ctx).Info("the cluster is being unregistered: the agent removes itself", "cluster", a.opts.Cluster)
	m, err := a.departure.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.leave(ctx, m)
}

// leave tells the hub that the agent is as good as gone, and removes it. It returns errDeparted when it is.
func (a *agent) leave(ctx context.Context, m *mark) error {
	a.healing.stop()
	err := a.tell(ctx, m)
	switch {
	case errors.Is(err, errOtherUID):
		return errors.Join(err, a.departure.stay(ctx))
	case err != nil && a.opts.Clock.Since(m.Since) < tellPatience:
		return err
	case err != nil:
		log.FromContext(ctx).Info("leaving without the hub's knowledge", "reason", err.Error())
	}
	return a.departure.remove(ctx)
}

// tell answers the order. A hub that does not know the Cluster or the certificate any more needs no answer.
func (a *agent) tell(ctx context.Context, m *mark) error {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	kubeconfig, _, err := a.home.read(ctx)
	if err != nil {
		return err
	}
	w, err := openWay(kubeconfig, a.opts)
	if err != nil {
		return err
	}
	hub, err := newHubClient(w.config)
	if err != nil {
		return err
	}
	err = a.tellHub(ctx, hub, m)
	if unknown(err) || refused(err) {
		return nil
	}
	return err
}

func (a *agent) tellHub(ctx context.Context, hub client.Client, m *mark) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.cluster(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if cluster.UID != m.Cluster {
		return errOtherUID
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationAgentOrder: orderDone}}})
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_, err = a.patchLease(ctx, hub, patch)
	return err
}

// marked returns the mark of a departure that was begun, nil if there is none.
func (d *departure) marked(ctx context.Context) (*mark, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	keeper, err := d.role.Get(ctx, d.keeper)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // none is an answer
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", d.keeper, err)
	}
	text, found := keeper.Annotations[departingAnnotation]
	if !found {
		return nil, nil //nolint:nilnil // none is an answer
	}
	credential, err := d.credential(ctx)
	if err != nil {
		return nil, err
	}
	m := &mark{}
	if json.Unmarshal([]byte(text), m) == nil && m.Credential == credential {
		return m, nil
	}
	log.FromContext(ctx).Info("the cluster was registered again while its agent was leaving: the agent stays")
	return nil, d.stay(ctx)
}

// prepare hands the agent's objects to the garbage collector and then marks what it keeps. Nothing is removed by it.
func (d *departure) prepare(ctx context.Context, cluster types.UID) (*mark, error) {
	plan, err := d.plan(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.handOver(ctx, plan); err != nil {
		return nil, err
	}
	m := &mark{Cluster: cluster, Since: d.opts.Clock.Now().UTC()}
	if m.Credential, err = d.credential(ctx); err != nil {
		return nil, err
	}
	value, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode mark: %w", err)
	}
	err = kube.OnConflict(ctx, func() error {
		keeper, err := d.role.Get(ctx, d.keeper)
		if err != nil {
			return err
		}
		return d.role.Patch(ctx, d.keeper, map[string]any{
			"resourceVersion": keeper.ResourceVersion, "annotations": map[string]any{departingAnnotation: string(value)},
		})
	})
	if err != nil {
		return nil, fmt.Errorf("mark %s: %w", d.keeper, err)
	}
	return m, nil
}

// remove removes the agent. It returns errDeparted when that is certain to happen.
func (d *departure) remove(ctx context.Context) error {
	m, err := d.marked(ctx)
	if err != nil {
		return err
	}
	if m == nil {
		return errNotMarked
	}
	plan, err := d.plan(ctx)
	if err != nil {
		return err
	}
	// Again: since it was prepared there may be more to hand over, or less.
	if err := d.handOver(ctx, plan); err != nil {
		return err
	}
	if plan.way == byAccount {
		if err := d.unbind(ctx); err != nil {
			return err
		}
	}
	for _, o := range plan.delete {
		if err := d.role.Delete(ctx, o.Object, o.uid); err != nil {
			return err
		}
	}
	return errDeparted
}

// stay takes back what prepare did.
func (d *departure) stay(ctx context.Context) error {
	for _, o := range append(d.dependents(), d.binding(), d.namespace(), d.records(), d.keeper) {
		if err := d.role.SetOwner(ctx, o, nil); err != nil {
			return err
		}
		if err := d.account.SetOwner(ctx, o, nil); err != nil {
			return err
		}
	}
	if err := d.dropLeavingRole(ctx); err != nil {
		return err
	}
	return d.role.Patch(ctx, d.keeper, map[string]any{"annotations": map[string]any{departingAnnotation: nil}})
}

// credential tells the kubeconfig in use apart from any other.
func (d *departure) credential(ctx context.Context) (string, error) {
	kubeconfig, _, err := d.home.read(ctx)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(kubeconfig)
	return hex.EncodeToString(sum[:]), nil
}
