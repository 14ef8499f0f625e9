package hub

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/hub/members"
	"github.com/towline/towline/internal/hub/spaces"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/works"
)

// karmada adds the controllers of Clusters and their Works.
func (h *hub) karmada(ctx context.Context) error {
	shard := h.opts.shard()
	guarded, err := h.guarded()
	if err != nil {
		return err
	}
	if shard.IsDefault() && guarded {
		answers := &approvals.Controller{Hub: h.GetClient(), Live: h.live, Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{}}
		if err := answers.Setup(ctx, h); err != nil {
			return err
		}
	}
	asking := &members.Controller{
		Hub: h.GetClient(), Shard: shard, Dial: h.members.Config, Heartbeats: h.heartbeats, Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{},
	}
	h.census.contacts = asking.Failures
	return errors.Join(
		asking.Setup(ctx, h),
		(&spaces.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Config: h.members.Config, WithdrawRemaining: h.remainder.Withdraw, Forget: h.engines.forget,
			Heartbeats: h.heartbeats, Events: h.GetEventRecorder(recorder), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&hubworks.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Engines: h.engines.observing, Changes: h.engines.worked, Clock: clock.RealClock{},
		}).Setup(ctx, h),
	)
}

// guarded says whether the hub can keep agents from writing of their own Clusters what is not theirs to say, for which it needs
// ValidatingAdmissionPolicies (Kubernetes 1.30). Without them no agent gets a certificate.
func (h *hub) guarded() (bool, error) {
	policies := schema.GroupKind{Group: "admissionregistration.k8s.io", Kind: "ValidatingAdmissionPolicy"}
	_, err := h.GetRESTMapper().RESTMapping(policies, "v1")
	if meta.IsNoMatchError(err) {
		h.GetLogger().Info("this hub has no ValidatingAdmissionPolicies: Clusters cannot be registered in pull mode")
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for ValidatingAdmissionPolicies: %w", err)
	}
	return true, nil
}

// observing returns the engine of a push member, as of does, for who also asks what became of single objects.
func (e *engines) observing(ctx context.Context, m fleet.Member) (works.Engine, error) {
	have, err := e.started(ctx, m)
	if err != nil {
		return nil, err
	}
	return have, nil
}
