package unclaimed

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
)

// BundleWithdrawer withdraws the remaining bundles of a cluster that is being deregistered. It is used after the
// cluster's ClusterSummaries and Works are deleted.
type BundleWithdrawer struct {
	Live      client.Reader
	Transport deliver.Transport
	// HubUID is the UID of the hub's namespace kube-system.
	HubUID string
}

// Withdraw withdraws every bundle that this hub delivered to m. If m is a Member.OnHub, these are the bundles on the
// hub for the member. pending describes the bundles whose withdrawal is not complete: the caller must call Withdraw
// again. kept describes the bundles of other or unknown hubs, which stay. The caller must check that m is reachable.
func (r BundleWithdrawer) Withdraw(ctx context.Context, m fleet.Member) (pending, kept []string, err error) {
	deployed, err := r.Transport.ListDeployed(ctx, m)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range deployed {
		fromThisHub, err := r.isFromThisHub(ctx, m, d)
		if err != nil {
			return pending, kept, err
		}
		if !fromThisHub {
			kept = append(kept, Describe(d))
			continue
		}
		done, err := r.Transport.Withdraw(ctx, m, bundle.Withdrawal{ID: d.ID, Orphan: m.KeepAddons})
		if err != nil {
			return pending, kept, fmt.Errorf("withdraw %s: %w", d.ID, err)
		}
		if !done {
			pending = append(pending, locatedBundle{d, m}.describe())
		}
	}
	return pending, kept, nil
}

// isFromThisHub returns whether this hub delivered a bundle. All bundles with a group or of a Member.OnHub are from
// this hub. If the inventory does not name the hub, an entry in the ClusterConfiguration is sufficient.
func (r BundleWithdrawer) isFromThisHub(ctx context.Context, m fleet.Member, d bundle.Deployed) (bool, error) {
	switch {
	case d.Requested, m.Mode == fleet.Local:
		return true, nil
	case d.Hub != "":
		return d.Hub == r.HubUID, nil
	}
	return isListed(ctx, r.Live, m, d)
}
