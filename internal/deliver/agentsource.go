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

// reportTries is the maximum number of attempts to write a report that another client changes meanwhile.
const reportTries = 3

// Errors of AgentSource.Fetch, besides ErrCorrupt.
var (
	// ErrContentMissing is the error of content that is not on the hub. An agent that has not stored the content reports
	// bundle.StateMissing, and the hub writes it again.
	ErrContentMissing = errors.New("content is not on the hub")
	// ErrUnsupported is the error of a group with options that this agent does not support. Only hubs other than Towline's
	// write such groups.
	ErrUnsupported = errors.New("not supported")
)

// ErrReplaced is the error of AgentSource.ReportStart if the hub has replaced the request.
var ErrReplaced = errors.New("the hub has replaced the request")

// Delivery is the request in one group, as the agent has read it last. It must not be changed.
type Delivery struct {
	ID bundle.ID
	// Digest is the digest of the requested bundle. For a hub other than Towline's it is a hash that changes with the
	// bundle.
	Digest bundle.Digest
	// Remove is true if the hub requests to withdraw ID, see Withdrawal. Otherwise it requests the bundle that Fetch
	// returns.
	Remove bool
	// Orphan is true if the withdrawal keeps the objects.
	Orphan bool
	// Reported is ReportOf the group. It may be about an older bundle: compare Reported.Digest with Digest.
	Reported bundle.Report

	group *libv1beta1.ConfigurationGroup
}

// Withdrawal returns the requested withdrawal if d.Remove is true.
func (d Delivery) Withdrawal() bundle.Withdrawal {
	return bundle.Withdrawal{ID: d.ID, Orphan: d.Orphan}
}

// Name returns the name of the group on the hub.
func (d Delivery) Name() string { return d.group.Name }

// newDelivery returns the request in group; ok is false if there is none, or if this agent must not execute it.
func newDelivery(group *libv1beta1.ConfigurationGroup) (d Delivery, ok bool) {
	id, ok := IDOf(group)
	if !ok || group.Spec.UpdatePhase == libv1beta1.UpdatePhasePreparing || group.Spec.DryRun {
		return Delivery{}, false
	}
	return Delivery{
		ID:       id,
		Digest:   bundle.DigestFromBytes(group.Spec.RequestorHash),
		Remove:   group.Spec.Action == libv1beta1.ActionRemove,
		Orphan:   group.Spec.LeavePolicies,
		Reported: ReportOf(group),
		group:    group,
	}, true
}

// AgentSource is the counterpart of PullTransport in the agent. It watches the requests of the hub for one member,
// fetches bundles, and writes reports.
type AgentSource struct {
	hub       client.WithWatch
	namespace string
	cluster   string
	groups    *groups
}

// NewAgentSource returns the AgentSource of a member. Its groups are in the given namespace of the hub and have a label
// with the name of the cluster. hub must have the agent's own credential, no cache, and a config of LimitResponses.
func NewAgentSource(hub client.WithWatch, namespace, cluster string) *AgentSource {
	return &AgentSource{hub: hub, namespace: namespace, cluster: cluster, groups: newGroups()}
}

// Fetch returns the bundle that d requests. It verifies every part with the hash in the group, and the bundle with
// d.Digest. It fails with ErrContentMissing if a part is not on the hub, with ErrCorrupt if a hash differs or a part
// cannot be decoded, and with ErrUnsupported.
func (i *AgentSource) Fetch(ctx context.Context, d Delivery) (bundle.Bundle, error) {
	if fields := unsupportedFields(d.group.Spec); fields != "" {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %s is %w", d.ID, fields, ErrUnsupported)
	}
	decoder := &decoder{}
	for _, item := range d.group.Spec.ConfigurationItems {
		if err := i.fetchItem(ctx, decoder, item); err != nil {
			return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
		}
	}
	b, err := decoder.bundle(d.group)
	if err != nil {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
	}
	if b.ID != d.ID {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w: it is for %s", d.ID, ErrCorrupt, b.ID)
	}
	return b, nil
}

func (i *AgentSource) fetchItem(ctx context.Context, decoder *decoder, item libv1beta1.ConfigurationItem) error {
	if item.ContentRef == nil {
		return fmt.Errorf("%w: an item refers to no bundle", ErrCorrupt)
	}
	key := client.ObjectKey{Namespace: item.ContentRef.Namespace, Name: item.ContentRef.Name}
	if key.Namespace == "" {
		key.Namespace = i.namespace
	}
	if key.Namespace != i.namespace && key.Namespace != kube.AgentNamespace {
		return fmt.Errorf("%w: an item refers to bundle %s, which is not for this member", ErrCorrupt, key)
	}
	obj := &libv1beta1.ConfigurationBundle{}
	err := i.hub.Get(ctx, key, obj)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: bundle %s", ErrContentMissing, key)
	}
	if err != nil {
		return fmt.Errorf("read bundle %s: %w", key, err)
	}
	if err := decoder.add(item, obj); err != nil {
		return fmt.Errorf("read bundle %s: %w", key, err)
	}
	return nil
}

// unsupportedFields returns the names of the set fields in spec that this agent does not support, "" if there are none.
func unsupportedFields(spec libv1beta1.ConfigurationGroupSpec) string {
	var names []string
	for name, present := range map[string]bool{
		"serviceAccountName": spec.ServiceAccountName != "",
		"preDeployChecks":    len(spec.PreDeployChecks)+len(spec.PreDeployCheckJobs) > 0,
		"validateHealths":    len(spec.ValidateHealths)+len(spec.ValidateHealthJobs) > 0,
	} {
		if present {
			names = append(names, name)
		}
	}
	// The order is fixed, so that the same problem has the same message.
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// Report writes report to the status of d's group. It sends one request, or none if the status does not change. The
// report may be about an older bundle, see report.Digest. Report returns nil if the group no longer exists. It fails if
// the stored status differs: a hub with an earlier CustomResourceDefinition, which drops fields, would never learn that
// it must write missing content again, or render outdated releases.
func (i *AgentSource) Report(ctx context.Context, d Delivery, report bundle.Report) error {
	_, err := i.writeReport(ctx, d, report)
	return err
}

// ReportStart reports that the revisions of the Helm releases of d may begin. The agent must begin none before: until
// then the hub forgets a rendering that it replaces. It fails with ErrReplaced if the hub has done that.
func (i *AgentSource) ReportStart(ctx context.Context, d Delivery) error {
	group, err := i.writeReport(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying})
	if err == nil && (group.UID != d.group.UID || group.Generation != d.group.Generation) {
		return fmt.Errorf("report the start of %s: %w", d.ID, ErrReplaced)
	}
	return err
}

// writeReport implements Report. It returns the group with the report.
func (i *AgentSource) writeReport(ctx context.Context, d Delivery, report bundle.Report) (*libv1beta1.ConfigurationGroup, error) {
	known := i.groups.latest(d.group)
	status := statusFor(d.group, known.Status, report)
	defer i.groups.beginReport(known.Name)()
	// The patch has only the differences to the known status. If another client has changed the status, the response
	// differs, and the next patch has the differences to the response.
	for tries := 0; tries < reportTries && !isSameReport(known.Status, status); tries++ {
		group := known.DeepCopy()
		group.Status = status
		err := i.hub.Status().Patch(ctx, group, client.MergeFrom(known))
		if apierrors.IsNotFound(err) {
			return &libv1beta1.ConfigurationGroup{}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("report %s: %w", d.ID, err)
		}
		i.groups.storeWritten(group)
		known = group
	}
	stored := known.Status
	stored.ObservedGeneration = status.ObservedGeneration // optional, see isObserved
	if !isSameReport(stored, status) {
		return nil, fmt.Errorf("report %s: the hub has not stored the whole status: its CustomResourceDefinition may be an earlier one", d.ID)
	}
	return known, nil
}

// MissingReport returns the report that requests the content of d again. detail names the missing content.
func (d Delivery) MissingReport(detail string) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateMissing, Message: strings.TrimSpace(detail)}
}
