package deliver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
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
	// ErrUnsupported is the error of a group with options that this agent does not support. Only Sveltos hubs write such
	// groups.
	ErrUnsupported = errors.New("not supported")
)

// errHubUnavailable is the error of requests that failed because the hub was not available: the delivery itself did not
// fail.
var errHubUnavailable = errors.New("the hub is not available")

// ErrReplaced is the error of AgentSource.ReportStart if the hub has replaced the request.
var ErrReplaced = errors.New("the hub has replaced the request")

// Delivery is the request in one group, as the agent has read it last. It must not be changed.
type Delivery struct {
	ID bundle.ID
	// Digest is the digest of the requested bundle. In a group of a Sveltos hub it is a hash that changes with the bundle.
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
	return bundle.Withdrawal{ID: d.ID, Orphan: d.Orphan, ServiceAccount: serviceAccountOf(d.group)}
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
	groups    *groupStore

	keyMu sync.Mutex // guards key
	// key is the key of the last encrypted content, nil if there was none.
	key *contentKey
}

// NewAgentSource returns the AgentSource of a member. Its groups are in the given namespace of the hub and have a label
// with the name of the cluster. hub must have the agent's own credential, no cache, and a config of LimitResponses.
func NewAgentSource(hub client.WithWatch, namespace, cluster string) *AgentSource {
	return &AgentSource{hub: hub, namespace: namespace, cluster: cluster, groups: newGroupStore()}
}

// Handler executes a delivery. After an error the AgentSource calls it again later, with the then current delivery.
type Handler func(ctx context.Context, d Delivery) error

// Run watches the member's groups with one watch and calls handle for each changed request, until ctx ends. It calls
// handle for up to workers groups concurrently, and not concurrently for the same group. After an error it calls handle
// again with a back-off. It does not call handle for a deleted group: only a delivery with Remove removes objects.
// When the hub is reachable again after an outage, Run handles all groups that are not provisioned.
func (s *AgentSource) Run(ctx context.Context, workers int, handle Handler) error {
	reflector := cache.NewReflectorWithOptions(s.listWatch(), &libv1beta1.ConfigurationGroup{}, s.groups, cache.ReflectorOptions{
		Name: "groups", Backoff: kube.WatchBackoff(), ResyncPeriod: resyncInterval,
	})
	var running sync.WaitGroup
	running.Go(func() { reflector.RunWithContext(ctx) })
	for range workers {
		running.Go(func() {
			for s.groups.handleNext(ctx, handle) {
			}
		})
	}
	<-ctx.Done()
	s.groups.queue.ShutDown()
	running.Wait()
	return nil
}

// Find returns the last known delivery for id; ok is false if there is none, or if the groups were not listed yet.
func (s *AgentSource) Find(id bundle.ID) (d Delivery, ok bool) {
	s.groups.mu.Lock()
	defer s.groups.mu.Unlock()
	for _, group := range s.groups.byName {
		if d, ok := newDelivery(group); ok && d.ID == id {
			return d, true
		}
	}
	return Delivery{}, false
}

// Wake makes Run handle the delivery for id again. It does nothing if Find finds none.
func (s *AgentSource) Wake(id bundle.ID) {
	if d, ok := s.Find(id); ok {
		s.groups.queue.Add(d.Name())
	}
}

// Synced returns whether all groups have been listed at least once.
func (s *AgentSource) Synced() bool {
	s.groups.mu.Lock()
	defer s.groups.mu.Unlock()
	return s.groups.synced
}

// listWatch lists and watches the groups of the member.
func (s *AgentSource) listWatch() cache.ListerWatcher {
	ofMember := []client.ListOption{
		client.InNamespace(s.namespace), client.MatchingLabels{libv1beta1.PullClusterNameLabel: labelValue(s.cluster)},
	}
	options := func(raw metav1.ListOptions) []client.ListOption {
		return append(slices.Clone(ofMember), &client.ListOptions{Raw: &raw, Limit: raw.Limit, Continue: raw.Continue})
	}
	return cache.ToListWatcherWithWatchListSemantics(kube.RetryConnection(kube.DetectRestore(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, raw metav1.ListOptions) (runtime.Object, error) {
			list := &libv1beta1.ConfigurationGroupList{}
			err := s.hub.List(ctx, list, options(raw)...)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, raw metav1.ListOptions) (watch.Interface, error) {
			return s.hub.Watch(ctx, &libv1beta1.ConfigurationGroupList{}, options(raw)...)
		},
	}), kube.AgentReconnectInterval), s.hub)
}

// Fetch returns the bundle that d requests. It verifies each ConfigurationBundle with the hash in the group, and the
// bundle with d.Digest. Groups of Sveltos hubs have no digest, and may have no hashes. Fetch fails with
// ErrContentMissing if content is not on the hub, with ErrCorrupt if a hash differs or content cannot be decoded, and
// with ErrUnsupported if a Sveltos hub has set options that this agent does not support.
func (s *AgentSource) Fetch(ctx context.Context, d Delivery) (bundle.Bundle, error) {
	if fields := unsupportedFields(d.group.Spec); fields != "" {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %s is %w", d.ID, fields, ErrUnsupported)
	}
	decoder := &decoder{}
	for _, reference := range d.group.Spec.ConfigurationItems {
		if err := s.fetchContent(ctx, decoder, reference); err != nil {
			return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
		}
	}
	b, err := decoder.result(d.group)
	if err != nil {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w", d.ID, err)
	}
	if b.ID != d.ID {
		return bundle.Bundle{}, fmt.Errorf("fetch %s: %w: it is for %s", d.ID, ErrCorrupt, b.ID)
	}
	return b, nil
}

// fetchContent reads the ConfigurationBundle of reference, and adds it to decoder.
func (s *AgentSource) fetchContent(ctx context.Context, decoder *decoder, reference libv1beta1.ConfigurationItem) error {
	if reference.ContentRef == nil {
		return fmt.Errorf("%w: an item refers to no content", ErrCorrupt)
	}
	key := client.ObjectKey{Namespace: reference.ContentRef.Namespace, Name: reference.ContentRef.Name}
	if key.Namespace == "" {
		key.Namespace = s.namespace
	}
	if key.Namespace != s.namespace && key.Namespace != kube.AgentNamespace {
		return fmt.Errorf("%w: an item refers to content %s, which is not for this member", ErrCorrupt, key)
	}
	obj := &libv1beta1.ConfigurationBundle{}
	err := s.hub.Get(ctx, key, obj)
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("%w: %s", ErrContentMissing, key)
	}
	if err != nil {
		return fmt.Errorf("read content %s: %w", key, markUnavailable(err))
	}
	contentKey, err := s.decrypt(ctx, obj)
	if err != nil {
		return fmt.Errorf("read content %s: %w", key, err)
	}
	if err := decoder.add(reference, obj, contentKey); err != nil {
		return fmt.Errorf("read content %s: %w", key, err)
	}
	return nil
}

// unsupportedFields returns the names of the set fields in spec that this agent does not support, "" if there are none.
func unsupportedFields(spec libv1beta1.ConfigurationGroupSpec) string {
	var names []string
	for _, field := range []struct {
		name  string
		isSet bool
	}{
		{"preDeployChecks", len(spec.PreDeployChecks)+len(spec.PreDeployCheckJobs) > 0},
		{"validateHealths", len(spec.ValidateHealths)+len(spec.ValidateHealthJobs) > 0},
	} {
		if field.isSet {
			names = append(names, field.name)
		}
	}
	return strings.Join(names, ", ")
}

// Report writes report to the status of d's group. It sends one request, or none if the status does not change. The
// report may be about an older bundle, see report.Digest. Report returns nil if the group no longer exists. It fails if
// the stored status differs: an earlier CustomResourceDefinition on the hub has dropped fields that the hub needs to
// write missing content again, or to render outdated releases.
func (s *AgentSource) Report(ctx context.Context, d Delivery, report bundle.Report) error {
	_, err := s.writeReport(ctx, d, report)
	return err
}

// ReportStart reports StateApplying. The agent must call it before it begins a revision of a Helm release: from then on
// the hub keeps the rendering in d, because a revision of it may exist. If the hub has replaced the rendering before,
// ReportStart fails with ErrReplaced, and the agent must not begin.
func (s *AgentSource) ReportStart(ctx context.Context, d Delivery) error {
	group, err := s.writeReport(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying})
	if err == nil && (group.UID != d.group.UID || group.Generation != d.group.Generation) {
		return fmt.Errorf("report the start of %s: %w", d.ID, ErrReplaced)
	}
	return err
}

// writeReport implements Report. It returns the group with the report, an empty one if the group no longer exists.
func (s *AgentSource) writeReport(ctx context.Context, d Delivery, report bundle.Report) (*libv1beta1.ConfigurationGroup, error) {
	known := s.groups.latest(d.group)
	status := statusFor(d.group, known.Status, report)
	endReport := s.groups.beginReport(known.Name)
	defer func() { endReport(known) }()
	// The patch has only the differences to the known status. If another client has changed the status, the response
	// differs, and the next patch has the differences to the response.
	for tries := 0; tries < reportTries && !isSameReport(known.Status, status); tries++ {
		group := known.DeepCopy()
		group.Status = status
		err := s.hub.Status().Patch(ctx, group, client.MergeFrom(known))
		if apierrors.IsNotFound(err) {
			return &libv1beta1.ConfigurationGroup{}, nil
		}
		if err != nil {
			return nil, fmt.Errorf("report %s: %w", d.ID, markUnavailable(err))
		}
		s.groups.storeWritten(group)
		known = group
	}
	stored := known.Status
	stored.ObservedGeneration = status.ObservedGeneration // optional, see isObserved
	if !isSameReport(stored, status) {
		return nil, fmt.Errorf("report %s: the hub has not stored the whole status: its CustomResourceDefinition may be an earlier one", d.ID)
	}
	return known, nil
}

// markUnavailable adds errHubUnavailable to the error of a request to the hub if the hub was not available.
func markUnavailable(err error) error {
	if kube.IsUnavailable(err) {
		return fmt.Errorf("%w: %w", errHubUnavailable, err)
	}
	return err
}

// MissingReport returns the report that requests the content of d again. message names the missing content.
func (d Delivery) MissingReport(message string) bundle.Report {
	return bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateMissing, Message: strings.TrimSpace(message)}
}

// Unrequested returns the value of kube.AnnotationUnrequested on the agent's Lease: the bundles in deployed without a
// group, "" if there are none. ListDeployed reads it on the hub. known is false before the groups have been listed.
func (s *AgentSource) Unrequested(deployed []bundle.Deployed) (value string, known bool) {
	s.groups.mu.Lock()
	defer s.groups.mu.Unlock()
	if !s.groups.synced {
		return "", false
	}
	requested := make(map[bundle.ID]bool, len(s.groups.byName))
	for _, group := range s.groups.byName {
		if id, ok := IDOf(group); ok {
			requested[id] = true
		}
	}
	unrequested := slices.DeleteFunc(slices.Clone(deployed), func(d bundle.Deployed) bool { return requested[d.ID] })
	if len(unrequested) == 0 {
		return "", true
	}
	raw, err := json.Marshal(unrequested[:min(len(unrequested), maxUnrequested)])
	if err != nil {
		return "", false // strings always have a JSON form
	}
	return string(raw), true
}
