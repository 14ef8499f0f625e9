package deliver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// reportTries is how often a report is written that somebody else changes at the same moment.
const reportTries = 3

// Errors of Inbox.Fetch, besides ErrCorrupt.
var (
	// ErrContentMissing is the error of content that the hub does not hold (any more). An agent that has no record of its own of that
	// content reports bundle.StateMissing, and the hub puts it there again.
	ErrContentMissing = errors.New("content is not on the hub")
	// ErrUnsupported is the error of a group that asks for what this agent cannot do. It comes from other hubs than Towline's.
	ErrUnsupported = errors.New("not supported")
)

// Delivery is one group as the agent last saw it: what the hub asks for. It is a value.
type Delivery struct {
	ID bundle.ID
	// Digest is the digest of the wanted bundle. Of a hub other than Towline's it is some hash that changes with the bundle.
	Digest bundle.Digest
	// Remove says that the hub asks to withdraw ID, as Withdrawal says; otherwise it asks for the bundle that Fetch returns.
	Remove bool
	// Leave says that withdrawing keeps the objects.
	Leave bool
	// Reported is what the hub was told about this group last. Pending: nothing, or nothing about the group as it is now.
	Reported bundle.Report

	group *libv1beta1.ConfigurationGroup
}

// Withdrawal returns what to withdraw when d.Remove is set.
func (d Delivery) Withdrawal() bundle.Withdrawal { return bundle.Withdrawal{ID: d.ID, Leave: d.Leave} }

// Name returns the name of the group on the hub.
func (d Delivery) Name() string { return d.group.Name }

// newDelivery returns what group asks for; ok is false if that is nothing yet or nothing this agent may touch.
func newDelivery(group *libv1beta1.ConfigurationGroup) (d Delivery, ok bool) {
	id, ok := IDOf(group)
	if !ok || group.Spec.UpdatePhase == libv1beta1.UpdatePhasePreparing || group.Spec.DryRun {
		return Delivery{}, false
	}
	return Delivery{
		ID:       id,
		Digest:   bundle.DigestFromBytes(group.Spec.RequestorHash),
		Remove:   group.Spec.Action == libv1beta1.ActionRemove,
		Leave:    group.Spec.LeavePolicies,
		Reported: ReportOf(group),
		group:    group,
	}, true
}

// Inbox is the agent's side of pull: it sees what the hub asks of one member, fetches it, and reports.
type Inbox struct {
	hub       client.WithWatch
	namespace string
	cluster   string
	groups    *groups
}

// NewInbox returns the Inbox of a member, whose groups are in namespace of the hub and carry the name of the cluster. hub talks to the
// hub with the agent's own credential and without a cache; make its config with LimitResponses.
func NewInbox(hub client.WithWatch, namespace, cluster string) *Inbox {
	return &Inbox{hub: hub, namespace: namespace, cluster: cluster, groups: newGroups()}
}

// Fetch returns the bundle that d asks for. Every part of it was checked against the hash in the group, and the whole against
// d.Digest. It returns ErrContentMissing if a part is not on the hub, ErrCorrupt if a part is not what the group says, and
// ErrUnsupported.
func (i *Inbox) Fetch(ctx context.Context, d Delivery) (bundle.Bundle, error) {
	if what := unsupported(d.group.Spec); what != "" {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %s is %w", d.ID, what, ErrUnsupported)
	}
	parts := &assembly{}
	for _, item := range d.group.Spec.ConfigurationItems {
		if err := i.fetchItem(ctx, parts, item); err != nil {
			return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
		}
	}
	b, err := parts.bundle(d.group)
	if err != nil {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
	}
	if b.ID != d.ID {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w: it is for %s", d.ID, ErrCorrupt, b.ID)
	}
	return b, nil
}

func (i *Inbox) fetchItem(ctx context.Context, parts *assembly, item libv1beta1.ConfigurationItem) error {
	if item.ContentRef == nil {
		return fmt.Errorf("%w: an item points at no bundle", ErrCorrupt)
	}
	key := client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}
	if key.Namespace == "" {
		key.Namespace = i.namespace
	}
	if key.Namespace != i.namespace && key.Namespace != kube.AgentNamespace {
		return fmt.Errorf("%w: an item points at bundle %s, which is not for this member", ErrCorrupt, key)
	}
	obj := &libv1beta1.ConfigurationBundle{}
	err := i.hub.Get(ctx, key, obj)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: bundle %s", ErrContentMissing, key)
	}
	if err != nil {
		return fmt.Errorf("read bundle %s: %w", key, err)
	}
	if err := parts.add(item, obj); err != nil {
		return fmt.Errorf("read bundle %s: %w", key, err)
	}
	return nil
}

// unsupported names what in spec this agent cannot do, "" if nothing.
func unsupported(spec libv1beta1.ConfigurationGroupSpec) string {
	var asked []string
	for name, present := range map[string]bool{
		"serviceAccountName": spec.ServiceAccountName != "",
		"preDeployChecks":    len(spec.PreDeployChecks)+len(spec.PreDeployCheckJobs) > 0,
		"validateHealths":    len(spec.ValidateHealths)+len(spec.ValidateHealthJobs) > 0,
	} {
		if present {
			asked = append(asked, name)
		}
	}
	// In one order, so that the same problem has the same message.
	slices.Sort(asked)
	return strings.Join(asked, ", ")
}

// Report tells the hub what the member says about d. It takes one request, and none if the hub knows already. A report about an older
// bundle than d asks for (report.Digest) is told as such. A group that is gone needs no report.
func (i *Inbox) Report(ctx context.Context, d Delivery, report bundle.Report) error {
	seen := i.groups.latest(d.group)
	status := statusFor(d.group, seen.Status, report)
	defer i.groups.beginReport(seen.Name)()
	// A patch holds what differs from the status as it was seen: if somebody changed that meanwhile, the answer shows it.
	for tries := 0; tries < reportTries && !sameNews(seen.Status, status); tries++ {
		group := seen.DeepCopy()
		group.Status = status
		err := i.hub.Status().Patch(ctx, group, client.MergeFrom(seen))
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("report %s: %w", d.ID, err)
		}
		i.groups.wrote(group)
		seen = group
	}
	return nil
}

// Missing returns the report that asks the hub for the content of d again. detail says what was looked for.
func (d Delivery) Missing(detail string) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateMissing, Message: strings.TrimSpace(detail)}
}
