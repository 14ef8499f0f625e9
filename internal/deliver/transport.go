package deliver

import (
	"context"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// Transport delivers bundles to members. To read the newest report, call Deliver again.
type Transport interface {
	// Deliver makes b the desired bundle of m and returns the newest known report for b.ID. The report may be about an
	// older bundle: the caller must compare the digest. The caller must call again after an error. StateFailed needs no
	// further call: the member retries, or this bundle can never succeed.
	Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes the objects of w.ID from m. done is true when all are removed. It requests this from the member
	// even if the hub does not know w.ID.
	Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (done bool, err error)
	// FindDeployed returns the bundle id on m; ok is false if m is not known to have it. It is called in every reconcile,
	// so it sends no request after the bundles of m have been read once.
	FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (d bundle.Deployed, ok bool, err error)
	// ListDeployed lists every bundle on m, sorted by ID, also bundles that the hub does not request.
	ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error)
}

// Engine applies bundles to one cluster, and lists them. The implementation is in package engine. It runs in the hub
// for push members, and in the agent for pull members.
type Engine interface {
	// Converge makes the cluster equal b. With an error the report has the changes that were made before. The caller must
	// call again after an error, unless it wraps bundle.TerminalError.
	Converge(ctx context.Context, b bundle.Bundle) (bundle.Report, error)
	// Withdraw removes the objects of w.ID; done is false while a deleted object still exists. The Engine continues the
	// withdrawal, and calls its OnReport when the caller must call Withdraw again.
	Withdraw(ctx context.Context, w bundle.Withdrawal) (done bool, err error)
	// FindDeployed returns the bundle in the inventory of id; ok is false if there is no inventory.
	FindDeployed(ctx context.Context, id bundle.ID) (d bundle.Deployed, ok bool, err error)
	// ListDeployed lists the bundles in the inventories on the cluster, sorted by ID.
	ListDeployed(ctx context.Context) ([]bundle.Deployed, error)
}
