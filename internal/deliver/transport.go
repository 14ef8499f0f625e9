package deliver

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// Transport carries bundles to members. It is level-triggered: to observe is to deliver again.
type Transport interface {
	// Deliver makes b the desired bundle of m and returns the freshest report known for b.ID. The report may be about an older
	// bundle: compare its digest.
	Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes everything w.ID put on m; done is true once nothing is left. It asks the member even if nothing is known of w.ID here.
	Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (done bool, err error)
	// FindDeployed returns what is known of the bundle id on m; ok is false if there is nothing. It is for every reconcile: it makes no request
	// once what m holds is known.
	FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (d bundle.Deployed, ok bool, err error)
	// ListDeployed lists every bundle on m, sorted by ID, those included that nobody on the hub asks for.
	ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error)
}

// Engine makes one cluster equal one bundle. Package engine has the one implementation; push runs it in the hub and pull in the agent.
type Engine interface {
	// Converge makes the cluster equal b. It returns what it did even when it fails half-way.
	Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes what w.ID put there; done is false while something that was deleted still exists.
	Withdraw(ctx context.Context, w bundle.Withdrawal) (done bool, err error)
}

// Inventory is an Engine that tells what its cluster holds.
type Inventory interface {
	Engine
	// FindDeployed returns what the records say of id; ok is false if there is no record.
	FindDeployed(ctx context.Context, id bundle.ID) (d bundle.Deployed, ok bool, err error)
	// ListDeployed lists what the records on the cluster say now, sorted by ID.
	ListDeployed(ctx context.Context) ([]bundle.Deployed, error)
}
