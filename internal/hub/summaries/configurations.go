package summaries

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// recordDeployed gives the deployed features to the writer of the ClusterConfiguration.
func (c *Controller) recordDeployed(_ context.Context, s *state) error {
	if owner := ProfileOf(s.summary); owner != nil {
		c.recordOn(s, *owner)
		c.recordOn(s.local, *owner)
	}
	return nil
}

// recordOn is recordDeployed for the features on the member or on the hub.
func (c *Controller) recordOn(s *state, owner metav1.OwnerReference) {
	var changes []configv1beta1.DeployedFeature
	updated := status.ComputeStatus(s.summary.Status, s.result)
	for _, composition := range s.compositions {
		if feature := status.FeatureOf(updated, composition.Feature); feature.Status == libv1beta1.FeatureStatusProvisioned {
			changes = append(changes, status.DeployedFeatureOf(composition.Bundle, feature, s.deploymentType()))
		}
	}
	for _, feature := range s.removedFeatures {
		changes = append(changes, configv1beta1.DeployedFeature{FeatureID: feature})
	}
	for _, feature := range updated.FeatureSummaries {
		// Each reconcile removes the entry again: the hub may have stopped before it wrote an earlier removal.
		if feature.Status == libv1beta1.FeatureStatusRemoved {
			changes = append(changes, configv1beta1.DeployedFeature{FeatureID: feature.FeatureID})
		}
	}
	c.Configurations.Set(s.member, owner, changes)
}

const (
	// configurationWorkers is the number of ClusterConfigurations that are written at the same time.
	configurationWorkers = 4
	// minConfigurationInterval and maxConfigurationInterval limit ConfigurationInterval.
	minConfigurationInterval = 5 * time.Second
	maxConfigurationInterval = time.Minute
	// intervalPerEntry is the time in ConfigurationInterval for each listed object or chart.
	intervalPerEntry = 50 * time.Millisecond
	// shutdownTimeout limits the time for the last writes when the hub stops.
	shutdownTimeout = 5 * time.Second
)

// Configurations writes ClusterConfigurations, which list the objects that each profile has deployed on a cluster. It
// is their only writer, so that the reconciles of a cluster's profiles do not cause conflicts. Changes are pending in
// memory until they are written: removals and the first change at once, others after ConfigurationInterval. If pending
// changes are lost with the process, the reconciles after the next start set them again. unclaimed.Controller removes
// the entries of summaries that do not exist. The controllers that deregister clusters call DeleteConfiguration.
type Configurations struct {
	hub   client.Client
	live  client.Reader
	shard fleet.Shard
	queue workqueue.TypedRateLimitingInterface[client.ObjectKey]

	// mu guards the fields below.
	mu sync.Mutex
	// pending are the changes that are not written yet.
	pending map[client.ObjectKey]*pendingConfiguration
	// nextWrites has the earliest time of the next write of each ClusterConfiguration.
	nextWrites map[client.ObjectKey]time.Time
}

// ConfigurationInterval returns the minimum time between two writes of a ClusterConfiguration with this number of
// objects and charts. All changes in that time are written together. The interval grows with the number, since each
// write contains all entries.
func ConfigurationInterval(entries int) time.Duration {
	return min(max(minConfigurationInterval, time.Duration(entries)*intervalPerEntry), maxConfigurationInterval)
}

// pendingConfiguration are the changes of one ClusterConfiguration, by profile and feature.
type pendingConfiguration struct {
	member  fleet.Member
	changes map[deployedKey]*deployedChange
}

// deployedKey identifies the entry of one profile and one feature, for the objects on the member (deployment type
// Remote) or on the hub (Local).
type deployedKey struct {
	kind, profile  string
	feature        libv1beta1.FeatureID
	deploymentType libv1beta1.DeploymentType
}

// deployedChange replaces the entry of feature, or removes it if feature has neither resources nor charts. owner is the
// reference to the profile.
type deployedChange struct {
	owner          metav1.OwnerReference
	feature        configv1beta1.DeployedFeature
	deploymentType libv1beta1.DeploymentType
}

// applyTo returns the status with the changes.
func (p pendingConfiguration) applyTo(current configv1beta1.ClusterConfigurationStatus) configv1beta1.ClusterConfigurationStatus {
	for _, change := range p.sorted() {
		current = status.SetDeployedFeature(current, change.owner.Kind, change.owner.Name, change.feature, change.deploymentType)
	}
	return current
}

// sorted returns the changes in a fixed order.
func (p pendingConfiguration) sorted() []*deployedChange {
	return slices.SortedFunc(maps.Values(p.changes), func(a, b *deployedChange) int {
		return cmp.Or(cmp.Compare(a.owner.Kind, b.owner.Kind), cmp.Compare(a.owner.Name, b.owner.Name), cmp.Compare(a.feature.FeatureID, b.feature.FeatureID), cmp.Compare(a.deploymentType, b.deploymentType))
	})
}

// NewConfigurations returns the writer for a shard. It writes only while Start runs. hub reads from a cache, which can
// lack the objects with the label of another shard. live reads from the API server.
func NewConfigurations(hub client.Client, live client.Reader, shard fleet.Shard) *Configurations {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[client.ObjectKey](minRetryDelay, maxRetryDelay)
	return &Configurations{
		hub: hub, live: live, shard: shard, queue: workqueue.NewTypedRateLimitingQueue(limiter),
		pending: map[client.ObjectKey]*pendingConfiguration{}, nextWrites: map[client.ObjectKey]time.Time{},
	}
}

// ConfigurationKey returns the namespace and name of the ClusterConfiguration of m.
func ConfigurationKey(m fleet.Member) client.ObjectKey {
	return client.ObjectKey{Namespace: m.Namespace, Name: strings.ToLower(string(m.Type)) + "--" + m.Name}
}

// DeleteConfiguration deletes the ClusterConfiguration of a cluster that is being deregistered, after its summaries are
// deleted. Entries of these summaries can be left if the hub was killed before it removed them.
func DeleteConfiguration(ctx context.Context, hub client.Writer, m fleet.Member) error {
	key := ConfigurationKey(m)
	configuration := &configv1beta1.ClusterConfiguration{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	if err := hub.Delete(ctx, configuration); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete ClusterConfiguration %s: %w", key, err)
	}
	return nil
}

// Set replaces the entries of the profile owner for the features in changes, and returns before they are written. It
// removes the entry of a feature without resources and charts. If m is a Member.OnHub, it replaces only the resources
// on the cluster of the hub, otherwise only the resources on the member.
func (c *Configurations) Set(m fleet.Member, owner metav1.OwnerReference, changes []configv1beta1.DeployedFeature) {
	if len(changes) == 0 {
		return
	}
	key, deploymentType := ConfigurationKey(m), deploymentTypeOf(m.Mode)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending[key] == nil {
		c.pending[key] = &pendingConfiguration{changes: map[deployedKey]*deployedChange{}}
	}
	c.pending[key].member = m
	for _, change := range changes {
		c.pending[key].changes[deployedKey{owner.Kind, owner.Name, change.FeatureID, deploymentType}] = &deployedChange{owner, change, deploymentType}
	}
	delay := time.Until(c.nextWrites[key])
	if slices.ContainsFunc(changes, isRemoval) {
		delay = 0 // after its last removal the cluster can be deleted
	}
	c.queue.AddAfter(key, delay)
}

// isRemoval returns whether a change removes an entry.
func isRemoval(feature configv1beta1.DeployedFeature) bool {
	return len(feature.Resources) == 0 && len(feature.Charts) == 0
}

// NeedLeaderElection returns true: only the leading hub writes.
func (c *Configurations) NeedLeaderElection() bool { return true }

// Start writes changes until ctx ends, and then all pending changes.
func (c *Configurations) Start(ctx context.Context) error {
	var workers sync.WaitGroup
	for range configurationWorkers {
		workers.Go(func() {
			for c.writeNext(ctx) {
			}
		})
	}
	<-ctx.Done()
	c.queue.ShutDown()
	workers.Wait()
	return c.writeAll(context.WithoutCancel(ctx))
}

// writeAll writes all pending changes within shutdownTimeout.
func (c *Configurations) writeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	c.mu.Lock()
	keys := slices.Collect(maps.Keys(c.pending))
	c.mu.Unlock()
	var errs []error
	for _, key := range keys {
		errs = append(errs, c.writePending(ctx, key))
	}
	return errors.Join(errs...)
}

// writeNext writes the next ClusterConfiguration. It returns false after the shutdown of the queue.
func (c *Configurations) writeNext(ctx context.Context) bool {
	key, isShutdown := c.queue.Get()
	if isShutdown {
		return false
	}
	defer c.queue.Done(key)
	if err := c.writePending(ctx, key); err != nil {
		if ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "write a ClusterConfiguration")
		}
		c.queue.AddRateLimited(key)
		return true
	}
	c.queue.Forget(key)
	return true
}

// writePending writes the changes of one ClusterConfiguration. Changes that are set meanwhile stay pending.
func (c *Configurations) writePending(ctx context.Context, key client.ObjectKey) error {
	snapshot, ok := c.snapshot(key)
	if !ok {
		return nil
	}
	interval, err := c.write(ctx, key, snapshot)
	if err != nil {
		return fmt.Errorf("update ClusterConfiguration %s: %w", key, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	pending := c.pending[key]
	maps.DeleteFunc(pending.changes, func(k deployedKey, change *deployedChange) bool { return snapshot.changes[k] == change })
	if len(pending.changes) == 0 {
		delete(c.pending, key)
	}
	if next := time.Now().Add(interval); next.After(c.nextWrites[key]) {
		c.nextWrites[key] = next
	}
	return nil
}

// snapshot returns a copy of the pending changes; ok is false if there are none.
func (c *Configurations) snapshot(key client.ObjectKey) (pending pendingConfiguration, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending[key] == nil {
		return pendingConfiguration{}, false
	}
	return pendingConfiguration{member: c.pending[key].member, changes: maps.Clone(c.pending[key].changes)}, true
}

// pendingFeature returns the pending entry for a feature of a profile on the member.
func (c *Configurations) pendingFeature(key client.ObjectKey, owner metav1.OwnerReference, feature libv1beta1.FeatureID) (entry configv1beta1.DeployedFeature, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pending[key] == nil {
		return entry, false
	}
	change := c.pending[key].changes[deployedKey{owner.Kind, owner.Name, feature, libv1beta1.DeploymentTypeRemote}]
	if change == nil {
		return entry, false
	}
	return change.feature, true
}

// Read returns the status of the ClusterConfiguration of m on the API server, with the pending changes.
func (c *Configurations) Read(ctx context.Context, m fleet.Member) (configv1beta1.ClusterConfigurationStatus, error) {
	key := ConfigurationKey(m)
	// The snapshot must be first: a change that is written between both reads is then applied twice and not lost.
	pending, _ := c.snapshot(key)
	existing := &configv1beta1.ClusterConfiguration{}
	if err := c.live.Get(ctx, key, existing); client.IgnoreNotFound(err) != nil {
		return existing.Status, fmt.Errorf("read ClusterConfiguration %s: %w", key, err)
	}
	return pending.applyTo(existing.Status), nil
}

// write applies pending to the ClusterConfiguration, and returns the minimum time until its next write. It reads the
// object from the cache, and from the API server if the cache lacks the object or after a conflict.
func (c *Configurations) write(ctx context.Context, key client.ObjectKey, pending pendingConfiguration) (time.Duration, error) {
	var reader client.Reader = c.hub
	interval := minConfigurationInterval
	err := kube.RetryOnConflict(ctx, func() error {
		existing := &configv1beta1.ClusterConfiguration{}
		err := reader.Get(ctx, key, existing)
		if apierrors.IsNotFound(err) {
			err = c.live.Get(ctx, key, existing)
		}
		reader = c.live
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		updated := pending.applyTo(existing.Status)
		if !equality.Semantic.DeepEqual(existing.Status, updated) {
			interval = ConfigurationInterval(countEntries(updated))
		}
		return c.apply(ctx, key, pending, existing, updated)
	})
	return interval, err
}

// countEntries returns the number of listed objects and charts.
func countEntries(s configv1beta1.ClusterConfigurationStatus) (count int) {
	status.EachDeployedFeature(s, func(_, _ string, feature configv1beta1.DeployedFeature) {
		count += len(feature.Resources) + len(feature.Charts)
	})
	return count
}

// apply writes the metadata and the status updated, or deletes the object if updated has no entries. existing has no
// resourceVersion if the object does not exist. A conflict error means that existing is stale.
func (c *Configurations) apply(
	ctx context.Context, key client.ObjectKey, pending pendingConfiguration,
	existing *configv1beta1.ClusterConfiguration, updated configv1beta1.ClusterConfigurationStatus,
) error {
	if status.IsEmpty(updated) {
		if existing.ResourceVersion == "" {
			return nil
		}
		return client.IgnoreNotFound(c.hub.Delete(ctx, existing, client.Preconditions{UID: &existing.UID, ResourceVersion: &existing.ResourceVersion}))
	}
	desired := existing.DeepCopy()
	desired.Namespace, desired.Name = key.Namespace, key.Name
	desired.Labels = map[string]string{
		libv1beta1.ClusterNameLabel: match.LabelValue(pending.member.Name),
		libv1beta1.ClusterTypeLabel: string(pending.member.Type),
	}
	c.shard.SetLabel(desired)
	for _, change := range pending.sorted() {
		desired.OwnerReferences = desiredOwners(desired.OwnerReferences, updated, change.owner)
	}
	if existing.ResourceVersion == "" {
		err := c.hub.Create(ctx, desired, client.FieldOwner(kube.FieldManager))
		if apierrors.IsAlreadyExists(err) {
			// The cache is behind: read it again.
			return apierrors.NewConflict(configv1beta1.GroupVersion.WithResource("clusterconfigurations").GroupResource(), key.Name, err)
		}
		if isNamespaceDeleted(err) {
			return nil
		}
		if err != nil {
			return err
		}
	} else if !equality.Semantic.DeepEqual(existing.ObjectMeta, desired.ObjectMeta) {
		kube.DropManagedFields(desired)
		if err := c.hub.Update(ctx, desired, client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
	}
	if equality.Semantic.DeepEqual(existing.Status, updated) {
		return nil
	}
	desired.Status = *updated.DeepCopy() // the client decodes the response into it
	return c.hub.Status().Update(ctx, desired, client.FieldOwner(kube.FieldManager))
}

// isNamespaceDeleted returns whether err is the error of a creation in a namespace that does not exist.
func isNamespaceDeleted(err error) bool {
	var response apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &response) {
		return false
	}
	details := response.Status().Details
	return details != nil && details.Kind == "namespaces"
}

// desiredOwners returns existing with the owner reference of a profile if updated lists the profile, otherwise without.
func desiredOwners(existing []metav1.OwnerReference, updated configv1beta1.ClusterConfigurationStatus, owner metav1.OwnerReference) []metav1.OwnerReference {
	isOfProfile := func(r metav1.OwnerReference) bool { return r.Kind == owner.Kind && r.Name == owner.Name }
	others := slices.DeleteFunc(slices.Clone(existing), isOfProfile)
	if !hasProfile(updated, owner) {
		return others
	}
	if owner.UID == "" {
		return existing // the UID is not known, since the profile is deleted: some of its objects stay on the cluster
	}
	reference := metav1.OwnerReference{APIVersion: owner.APIVersion, Kind: owner.Kind, Name: owner.Name, UID: owner.UID}
	if index := slices.IndexFunc(existing, isOfProfile); index >= 0 && existing[index] == reference {
		return existing
	}
	return append(others, reference)
}

func hasProfile(s configv1beta1.ClusterConfigurationStatus, owner metav1.OwnerReference) bool {
	if owner.Kind == configv1beta1.ProfileKind {
		return slices.ContainsFunc(s.ProfileResources, func(r configv1beta1.ProfileResource) bool { return r.ProfileName == owner.Name })
	}
	return slices.ContainsFunc(s.ClusterProfileResources, func(r configv1beta1.ClusterProfileResource) bool {
		return r.ClusterProfileName == owner.Name
	})
}
