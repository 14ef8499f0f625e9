package hub

import (
	"context"
	"errors"

	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/hub/clusters"
	"github.com/towline/towline/internal/hub/executionnamespaces"
	hubworks "github.com/towline/towline/internal/hub/works"
	"github.com/towline/towline/internal/works"
)

// addKarmadaControllers adds the controllers of Clusters and their Works.
func (h *hub) addKarmadaControllers(ctx context.Context) error {
	shard := h.opts.shard()
	if shard.IsDefault() {
		approvalController := &approvals.Controller{Hub: h.GetClient(), Live: h.live, Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{}}
		if err := approvalController.Setup(ctx, h); err != nil {
			return err
		}
	}
	memberController := &clusters.Controller{
		Hub: h.GetClient(), Shard: shard, MemberConfig: h.members.Config, ReserveMemory: h.members.ReserveCounterMemory,
		Heartbeats: h.heartbeats, Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{},
	}
	h.metricsCollector.failedContacts = memberController.Failures
	return errors.Join(
		memberController.Setup(ctx, h),
		(&executionnamespaces.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Config: h.members.Config, WithdrawRemaining: h.bundleWithdrawer.Withdraw, Forget: h.engines.forget,
			Heartbeats: h.heartbeats, Events: h.GetEventRecorder(reportingController), Clock: clock.RealClock{},
		}).Setup(ctx, h),
		(&hubworks.Controller{
			Hub: h.GetClient(), Live: h.live, Shard: shard, Engines: h.engines.forWorks, Changes: h.engines.changedWorks, Clock: clock.RealClock{},
		}).Setup(ctx, h),
	)
}

// forWorks returns the engine of a push member for the execution of Works.
func (e *engines) forWorks(ctx context.Context, m fleet.Member) (works.Engine, error) {
	engine, err := e.engineFor(ctx, m)
	if err != nil {
		return nil, err
	}
	return engine, nil
}
