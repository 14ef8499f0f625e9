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
	// uninstallAnnotation is set on the state object once an uninstallation is prepared. Its value is an
	// uninstallState.
	uninstallAnnotation = "towline.dev/departing"
	// removedAnswer is the agent's answer to the removal request, in kube.AnnotationAgentOrder on its Lease.
	removedAnswer = "removed"
	// answerTimeout is how long an uninstallation waits for a hub that does not accept the answer. Without the answer
	// the hub would wait for the agent.
	answerTimeout = 10 * time.Minute
)

// Errors that end a session because of an uninstallation.
var (
	errUninstallRequested = errors.New("the hub requests the removal of the agent")
	errUninstalled        = errors.New("the agent has uninstalled itself")
	errOtherCluster       = errors.New("the hub has another Cluster with this name")
	errNoUninstallState   = errors.New("the state of the uninstallation is missing")
)

// uninstallState is the value of uninstallAnnotation, in JSON.
type uninstallState struct {
	// Cluster is the UID of the Cluster whose removal was requested.
	Cluster types.UID `json:"cluster"`
	// Credential is a hash of the kubeconfig at that time. Another kubeconfig belongs to a later registration, which
	// must stay.
	Credential string `json:"credential"`
	// Since is the time of the request.
	Since time.Time `json:"since"`
}

// isUninstallRequested returns true if cluster has the hub's removal request, which is valid only while the Cluster is
// being deleted.
func isUninstallRequested(cluster *clusterv1alpha1.Cluster) bool {
	return cluster.DeletionTimestamp != nil && cluster.Annotations[kube.AnnotationAgentOrder] == kube.AgentOrderRemove
}

// uninstall removes the agent if the hub still requests that. After a restart, finishUninstall continues from the
// uninstallState.
func (a *agent) uninstall(ctx context.Context, hub client.Client) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if !isUninstallRequested(cluster) {
		return fmt.Errorf("the Cluster %s was replaced before its agent was removed", a.opts.Cluster)
	}
	log.FromContext(ctx).Info("the cluster is being unregistered; uninstalling the agent", "cluster", a.opts.Cluster)
	state, err := a.uninstaller.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.finishUninstall(ctx, state)
}

// finishUninstall answers the hub and then removes the agent. It returns errUninstalled after that.
func (a *agent) finishUninstall(ctx context.Context, state *uninstallState) error {
	a.engines.stop()
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

// answerHub answers the removal request. A hub that knows neither the Cluster nor the certificate needs no answer.
func (a *agent) answerHub(ctx context.Context, state *uninstallState) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	kubeconfig, _, err := a.credentials.read(ctx)
	if err != nil {
		return err
	}
	transport, err := newHubTransport(kubeconfig, a.opts)
	if err != nil {
		return err
	}
	hub, err := newHubClient(transport.config)
	if err != nil {
		return err
	}
	err = a.writeAnswer(ctx, hub, state)
	if isMissingCluster(err) || isRejected(err) {
		return nil
	}
	return err
}

func (a *agent) writeAnswer(ctx context.Context, hub client.Client, state *uninstallState) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if cluster.UID != state.Cluster {
		return errOtherCluster
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationAgentOrder: removedAnswer}}})
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_, err = a.patchLease(ctx, hub, patch)
	return err
}

// readState returns the state of an uninstallation that has begun, or nil.
func (u *uninstaller) readState(ctx context.Context) (*uninstallState, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	object, err := u.roleOwner.Get(ctx, u.stateObject)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // nil means no uninstallation
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", u.stateObject, err)
	}
	text, found := object.Annotations[uninstallAnnotation]
	if !found {
		return nil, nil //nolint:nilnil // nil means no uninstallation
	}
	credential, err := u.credentialHash(ctx)
	if err != nil {
		return nil, err
	}
	state := &uninstallState{}
	if json.Unmarshal([]byte(text), state) == nil && state.Credential == credential {
		return state, nil
	}
	log.FromContext(ctx).Info("the cluster was registered again during the uninstallation of its agent; keeping the agent")
	return nil, u.rollBack(ctx)
}

// prepare sets owners on the agent's objects and then writes the uninstallState. It deletes nothing.
func (u *uninstaller) prepare(ctx context.Context, cluster types.UID) (*uninstallState, error) {
	plan, err := u.plan(ctx)
	if err != nil {
		return nil, err
	}
	if err := u.setOwners(ctx, plan); err != nil {
		return nil, err
	}
	state := &uninstallState{Cluster: cluster, Since: u.opts.Clock.Now().UTC()}
	if state.Credential, err = u.credentialHash(ctx); err != nil {
		return nil, err
	}
	value, err := json.Marshal(state)
	if err != nil {
		return nil, fmt.Errorf("encode the state of the uninstallation: %w", err)
	}
	err = kube.RetryOnConflict(ctx, func() error {
		object, err := u.roleOwner.Get(ctx, u.stateObject)
		if err != nil {
			return err
		}
		return u.roleOwner.Patch(ctx, u.stateObject, map[string]any{
			"resourceVersion": object.ResourceVersion, "annotations": map[string]any{uninstallAnnotation: string(value)},
		})
	})
	if err != nil {
		return nil, fmt.Errorf("record the uninstallation in %s: %w", u.stateObject, err)
	}
	return state, nil
}

// remove deletes the agent's objects. It returns errUninstalled after that.
func (u *uninstaller) remove(ctx context.Context) error {
	state, err := u.readState(ctx)
	if err != nil {
		return err
	}
	if state == nil {
		return errNoUninstallState
	}
	plan, err := u.plan(ctx)
	if err != nil {
		return err
	}
	// Repeated, because objects may have been added or removed since prepare.
	if err := u.setOwners(ctx, plan); err != nil {
		return err
	}
	if plan.method == deleteAccount {
		if err := u.removeFromBinding(ctx); err != nil {
			return err
		}
	}
	for _, o := range plan.deletions {
		if err := u.roleOwner.Delete(ctx, o.Object, o.uid); err != nil {
			return err
		}
	}
	return errUninstalled
}

// rollBack undoes prepare.
func (u *uninstaller) rollBack(ctx context.Context) error {
	for _, o := range append(u.dependents(), u.binding(), u.namespaceObject(), u.inventoryObject(), u.stateObject) {
		if err := u.roleOwner.SetOwner(ctx, o, nil); err != nil {
			return err
		}
		if err := u.accountOwner.SetOwner(ctx, o, nil); err != nil {
			return err
		}
	}
	if err := u.deleteUninstallRole(ctx); err != nil {
		return err
	}
	return u.roleOwner.Patch(ctx, u.stateObject, map[string]any{"annotations": map[string]any{uninstallAnnotation: nil}})
}

// credentialHash returns a hash of the kubeconfig in use.
func (u *uninstaller) credentialHash(ctx context.Context) (string, error) {
	kubeconfig, _, err := u.credentials.read(ctx)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(kubeconfig)
	return hex.EncodeToString(sum[:]), nil
}
