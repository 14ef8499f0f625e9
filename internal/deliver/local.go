package deliver

import (
	"context"
	"strings"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
)

// LocalTransport is the Transport for fleet.Member.OnHub: it delivers bundles for members to the hub's cluster. One
// engine has the bundles for all members. Its IDs contain the member, because clusters in different namespaces have
// summaries of the same name. Callers see the IDs without the member.
type LocalTransport struct {
	// Push runs the engine for the cluster of the hub, with the bundles of the given member.
	Push *PushTransport
}

var _ Transport = (*LocalTransport)(nil)

// Deliver converges the hub to b. KnownDigest is the digest of b with the caller's ID, since the engine gets
// b with another ID.
func (d *LocalTransport) Deliver(ctx context.Context, m fleet.Member, b bundle.Bundle) (report bundle.Report, err error) {
	callerID := b.ID
	if b.KnownDigest, err = b.Digest(); err != nil {
		return bundle.Report{ID: callerID, State: bundle.StatePending}, err
	}
	b.ID = LocalID(m.ID(), callerID)
	report, err = d.Push.Deliver(ctx, m, b)
	report.ID = callerID
	return report, err
}

// Withdraw withdraws w from the hub.
func (d *LocalTransport) Withdraw(ctx context.Context, m fleet.Member, w bundle.Withdrawal) (bool, error) {
	w.ID = LocalID(m.ID(), w.ID)
	return d.Push.Withdraw(ctx, m, w)
}

// FindDeployed returns the bundle id for m on the hub.
func (d *LocalTransport) FindDeployed(ctx context.Context, m fleet.Member, id bundle.ID) (bundle.Deployed, bool, error) {
	found, ok, err := d.Push.FindDeployed(ctx, m, LocalID(m.ID(), id))
	found.ID, found.Report.ID = id, id
	return found, ok, err
}

// ListDeployed lists the bundles for m on the hub.
func (d *LocalTransport) ListDeployed(ctx context.Context, m fleet.Member) ([]bundle.Deployed, error) {
	all, err := d.Push.ListDeployed(ctx, m)
	if err != nil {
		return nil, err
	}
	for i := range all {
		_, id, _ := ParseLocalID(all[i].ID)
		all[i].ID, all[i].Report.ID = id, id
	}
	return all, nil
}

// LocalPartition returns the inventory partition of the bundles for a cluster.
func LocalPartition(cluster fleet.ID) string {
	return strings.Join([]string{string(cluster.Type), cluster.Namespace, cluster.Name}, "/")
}

// ParseLocalPartition is the reverse of LocalPartition. For any other string it returns an ID that no cluster has.
func ParseLocalPartition(partition string) fleet.ID {
	cluster, _, _ := ParseLocalID(bundle.ID{RequestorName: partition + "/"})
	return cluster
}

// LocalID returns the ID that the bundle id for a cluster has in the engine of the hub's cluster.
func LocalID(cluster fleet.ID, id bundle.ID) bundle.ID {
	id.RequestorName = LocalPartition(cluster) + "/" + id.RequestorName
	return id
}

// ParseLocalID is the reverse of LocalID; ok is false for another ID. None of the parts can have a slash.
func ParseLocalID(local bundle.ID) (cluster fleet.ID, id bundle.ID, ok bool) {
	parts := strings.Split(local.RequestorName, "/")
	if len(parts) != 4 {
		return fleet.ID{}, local, false
	}
	local.RequestorName = parts[3]
	return fleet.ID{Type: fleet.Type(parts[0]), Namespace: parts[1], Name: parts[2]}, local, true
}
