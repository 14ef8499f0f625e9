package session

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	// answerTimeout is how long an uninstallation waits for a hub that does not accept the answer. Until it has the
	// answer, the hub waits for the agent.
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
	// CredentialHash is the HashCredential of the credential at that time. Another credential belongs to a later
	// registration, which must stay.
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

// ParseUninstallState returns the state in a state object for which HasUninstallState is true. It returns nil if the
// state is invalid or has another hash of a credential. The caller must roll that uninstallation back.
func ParseUninstallState(ctx context.Context, object client.Object, credentialHash string) *UninstallState {
	state := &UninstallState{}
	if json.Unmarshal([]byte(object.GetAnnotations()[uninstallAnnotation]), state) == nil && state.CredentialHash == credentialHash {
		return state
	}
	log.FromContext(ctx).Info("the recorded uninstallation is invalid or of an earlier registration; keeping the agent")
	return nil
}

// WriteUninstallState writes state to the annotations of o, together with fields of its metadata. It replaces the
// annotations in fields, which must not be nil.
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

// HashCredential returns a hash of the data of the Secret with the agent's credential, for UninstallState.
func HashCredential(secret *corev1.Secret) string {
	hash := sha256.New()
	for _, key := range slices.Sorted(maps.Keys(secret.Data)) {
		_, _ = fmt.Fprintf(hash, "%s %d ", key, len(secret.Data[key])) // a hash never returns an error
		hash.Write(secret.Data[key])
	}
	return hex.EncodeToString(hash.Sum(nil))
}
