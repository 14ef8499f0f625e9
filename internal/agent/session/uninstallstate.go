package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/kube"
)

const (
	// uninstallAnnotation is set on the state object of an agent once an uninstallation is prepared. Its value is an
	// UninstallState.
	uninstallAnnotation = "towline.dev/departing"
	// answerTimeout is how long an uninstallation waits for a hub that does not accept the answer. Without the answer
	// the hub would wait for the agent.
	answerTimeout = 10 * time.Minute
)

// Errors that end a session because of an uninstallation. ErrOtherCluster also ends the uninstallation.
var (
	ErrUninstallRequested = errors.New("the hub requests the removal of the agent")
	ErrUninstalled        = errors.New("the agent has uninstalled itself")
	ErrOtherCluster       = errors.New("the hub has another cluster with this name")
)

// UninstallState is the value of uninstallAnnotation, in JSON.
type UninstallState struct {
	// ClusterUID is the UID of the cluster object whose removal was requested.
	ClusterUID types.UID `json:"cluster"`
	// CredentialHash is a hash of the credential at that time. Another credential belongs to a later registration, which
	// must stay.
	CredentialHash string `json:"credential"`
	// Since is the time of the request.
	Since time.Time `json:"since"`
}

// IsUninstallRequested returns true if a cluster object has the hub's removal request, which is valid only while the
// object is being deleted.
func IsUninstallRequested(cluster client.Object) bool {
	return cluster.GetDeletionTimestamp() != nil && cluster.GetAnnotations()[kube.AnnotationAgentRequest] == kube.AgentRequestRemove
}

// HasUninstallState returns whether a state object has a state.
func HasUninstallState(object client.Object) bool {
	_, found := object.GetAnnotations()[uninstallAnnotation]
	return found
}

// ReadUninstallState returns the state in a state object. It returns nil if the state has another hash of a credential.
// The caller must roll that uninstallation back.
func ReadUninstallState(ctx context.Context, object client.Object, credentialHash string) *UninstallState {
	state := &UninstallState{}
	if json.Unmarshal([]byte(object.GetAnnotations()[uninstallAnnotation]), state) == nil && state.CredentialHash == credentialHash {
		return state
	}
	log.FromContext(ctx).Info("the cluster was registered again during the uninstallation of its agent; keeping the agent")
	return nil
}

// WriteUninstallState writes state to the annotations of o, together with other fields of its metadata.
func (c *OwnerClient) WriteUninstallState(ctx context.Context, o ObjectRef, state *UninstallState, fields map[string]any) error {
	value, err := json.Marshal(state)
	if err != nil {
		return fmt.Errorf("encode the state of the uninstallation: %w", err)
	}
	fields["annotations"] = map[string]any{uninstallAnnotation: string(value)}
	return c.Patch(ctx, o, fields)
}

// DeleteUninstallState removes the state from o.
func (c *OwnerClient) DeleteUninstallState(ctx context.Context, o ObjectRef) error {
	return c.Patch(ctx, o, map[string]any{"annotations": map[string]any{uninstallAnnotation: nil}})
}

// Uninstallation has the steps that complete a prepared uninstallation.
type Uninstallation struct {
	Clock clock.PassiveClock
	// Answer answers the hub's request. It returns ErrOtherCluster if the cluster on the hub has not state.ClusterUID.
	Answer func(ctx context.Context, state *UninstallState) error
	// RollBack undoes the preparation. Remove deletes the agent's objects, and returns ErrUninstalled.
	RollBack, Remove func(ctx context.Context) error
}

// Finish answers the hub, removes the agent, and returns ErrUninstalled. If Answer returns ErrOtherCluster, it rolls
// back instead. For other errors of Answer the caller must retry; after answerTimeout they are ignored.
func (u Uninstallation) Finish(ctx context.Context, state *UninstallState) error {
	err := u.Answer(ctx, state)
	switch {
	case errors.Is(err, ErrOtherCluster):
		return errors.Join(err, u.RollBack(ctx))
	case err != nil && u.Clock.Since(state.Since) < answerTimeout:
		return err
	case err != nil:
		log.FromContext(ctx).Info("uninstalling the agent although the hub did not accept the answer", "reason", err.Error())
	}
	return u.Remove(ctx)
}
