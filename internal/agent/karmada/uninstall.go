package karmada

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/kube"
)

// removedAnswer is the agent's answer to the removal request, in kube.AnnotationAgentRequest on its Lease.
const removedAnswer = "removed"

// errNoUninstallState is returned by remove if the uninstallation was rolled back after prepare.
var errNoUninstallState = errors.New("the state of the uninstallation is missing")

// uninstall removes the agent if the hub still requests that. After a restart, finishUninstall continues from the
// UninstallState.
func (a *agent) uninstall(ctx context.Context, hub client.Client) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if !session.IsUninstallRequested(cluster) {
		return fmt.Errorf("the Cluster %s was replaced before its agent was removed", a.opts.Cluster)
	}
	log.FromContext(ctx).Info("the cluster is being unregistered; uninstalling the agent", "cluster", a.opts.Cluster)
	state, err := a.uninstaller.prepare(ctx, cluster.UID)
	if err != nil {
		return err
	}
	return a.finishUninstall(ctx, state)
}

// finishUninstall stops the engine, answers the hub, removes the agent, and returns session.ErrUninstalled. If the hub
// has another Cluster of this name now, it rolls the uninstallation back instead.
func (a *agent) finishUninstall(ctx context.Context, state *session.UninstallState) error {
	a.engineRunner.stop()
	u := session.Uninstallation{Clock: a.opts.Clock, Answer: a.answerHub, RollBack: a.uninstaller.rollBack, Remove: a.uninstaller.remove}
	return u.Finish(ctx, state)
}

// answerHub sends the answer to the removal request. A hub that returns NotFound or Forbidden for the Cluster, or
// rejects the certificate, needs no answer.
func (a *agent) answerHub(ctx context.Context, state *session.UninstallState) error {
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

// writeAnswer sets the answer, removedAnswer on the Lease.
func (a *agent) writeAnswer(ctx context.Context, hub client.Client, state *session.UninstallState) error {
	cluster := &clusterv1alpha1.Cluster{}
	if err := hub.Get(ctx, a.clusterKey(), cluster); err != nil {
		return fmt.Errorf("read Cluster %s: %w", a.opts.Cluster, err)
	}
	if cluster.UID != state.ClusterUID {
		return session.ErrOtherCluster
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]any{kube.AnnotationAgentRequest: removedAnswer}}})
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	_, err = a.patchLease(ctx, hub, patch)
	return err
}

// resumeOrRollBack returns the state of an uninstallation that has begun, nil if none has. If the state is from an
// earlier registration, resumeOrRollBack rolls the uninstallation back.
func (u *uninstaller) resumeOrRollBack(ctx context.Context) (*session.UninstallState, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	object, err := u.Get(ctx, u.stateObject)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("read %s: %w", u.stateObject, err)
	}
	if err != nil || !session.HasUninstallState(object) {
		return nil, nil //nolint:nilnil // nil is the documented result without an uninstallation
	}
	credential, err := u.credentialHash(ctx)
	if err != nil {
		return nil, err
	}
	if state := session.ParseUninstallState(ctx, object, credential); state != nil {
		return state, nil
	}
	return nil, u.rollBack(ctx)
}

// prepare writes the UninstallState. It deletes nothing.
func (u *uninstaller) prepare(ctx context.Context, cluster types.UID) (*session.UninstallState, error) {
	credential, err := u.credentialHash(ctx)
	if err != nil {
		return nil, err
	}
	state := &session.UninstallState{ClusterUID: cluster, CredentialHash: credential, Since: u.opts.Clock.Now().UTC()}
	err = kube.RetryOnConflict(ctx, func() error {
		object, err := u.Get(ctx, u.stateObject)
		if err != nil {
			return err
		}
		return u.WriteUninstallState(ctx, u.stateObject, state, map[string]any{"resourceVersion": object.ResourceVersion})
	})
	if err != nil {
		return nil, fmt.Errorf("record the uninstallation in %s: %w", u.stateObject, err)
	}
	return state, nil
}

// remove deletes the agent's objects, and then returns session.ErrUninstalled. The garbage collector may still be
// deleting dependents.
func (u *uninstaller) remove(ctx context.Context) error {
	state, err := u.resumeOrRollBack(ctx)
	if err != nil {
		return err
	}
	if state == nil {
		return errNoUninstallState
	}
	if err := u.deleteRegistration(ctx); err != nil {
		return err
	}
	return session.ErrUninstalled
}

// rollBack undoes prepare, and removes the owners that deleteRegistration has set on namespaces.
func (u *uninstaller) rollBack(ctx context.Context) error {
	for _, o := range u.namespaces() {
		if err := u.SetOwner(ctx, o, nil); err != nil {
			return err
		}
	}
	return u.DeleteUninstallState(ctx, u.stateObject)
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
