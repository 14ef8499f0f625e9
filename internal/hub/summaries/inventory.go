package summaries

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/status"
)

// record writes the deployed features to the cluster's ClusterConfiguration, before the status reports them.
func (c *Controller) recordDeployed(ctx context.Context, s *state) error {
	owner := metav1.GetControllerOf(s.summary)
	if owner == nil {
		return nil
	}
	var changes []configv1beta1.DeployedFeature
	folded := status.Fold(s.summary.Status, s.pass)
	for _, composition := range s.compositions {
		if feature := status.FeatureOf(folded, composition.Feature); feature.Status == libv1beta1.FeatureStatusProvisioned {
			changes = append(changes, status.Deployed(composition.Bundle, feature.LastAppliedTime))
		}
	}
	for _, feature := range s.removedFeatures {
		changes = append(changes, configv1beta1.DeployedFeature{FeatureID: feature})
	}
	if len(changes) == 0 {
		return nil
	}
	err := c.configurations().Update(ctx, s.member, *owner, changes)
	if err != nil && len(s.removedFeatures) == 0 {
		// The status is reported although the ClusterConfiguration does not have it yet.
		s.retryErr = errors.Join(s.retryErr, err)
		return nil
	}
	return err
}

func (c *Controller) configurations() Configurations { return Configurations{Hub: c.Hub, Live: c.Live} }

// Configurations writes ClusterConfigurations, which list what each profile has deployed on a cluster.
type Configurations struct {
	// Hub reads from a cache; Live reads from the API server.
	Hub  client.Client
	Live client.Reader
}

// ConfigurationKey returns the namespace and name of the ClusterConfiguration of m.
func ConfigurationKey(m fleet.Member) client.ObjectKey {
	return client.ObjectKey{Namespace: m.Namespace, Name: strings.ToLower(string(m.Type)) + "--" + m.Name}
}

// Update writes changes for the profile owner. Other profiles on the cluster write to the same object. A feature
// without resources and charts is removed.
func (c Configurations) Update(ctx context.Context, m fleet.Member, owner metav1.OwnerReference, changes []configv1beta1.DeployedFeature) error {
	var reader client.Reader = c.Hub
	name := ConfigurationKey(m)
	err := kube.RetryOnConflict(ctx, func() error {
		have := &configv1beta1.ClusterConfiguration{}
		err := reader.Get(ctx, name, have)
		reader = c.Live
		if client.IgnoreNotFound(err) != nil {
			return err
		}
		now := have.Status
		for _, change := range changes {
			now = status.Inventory(now, owner.Kind, owner.Name, change)
		}
		return c.write(ctx, m, inventoryChange{have: have, name: name, now: now, owner: owner})
	})
	if err != nil {
		return fmt.Errorf("update inventory %s: %w", name, err)
	}
	return nil
}

// inventoryChange is one change of a ClusterConfiguration.
type inventoryChange struct {
	have  *configv1beta1.ClusterConfiguration
	name  client.ObjectKey
	now   configv1beta1.ClusterConfigurationStatus
	owner metav1.OwnerReference
}

func (c Configurations) write(ctx context.Context, m fleet.Member, i inventoryChange) error {
	exists := i.have.UID != ""
	if status.Empty(i.now) {
		if !exists {
			return nil
		}
		return client.IgnoreNotFound(c.Hub.Delete(ctx, i.have, client.Preconditions{UID: &i.have.UID, ResourceVersion: &i.have.ResourceVersion}))
	}
	want := i.have.DeepCopy()
	want.Namespace, want.Name = i.name.Namespace, i.name.Name
	want.Labels = map[string]string{
		libv1beta1.ClusterNameLabel: match.LabelValue(m.Name),
		libv1beta1.ClusterTypeLabel: string(m.Type),
	}
	want.OwnerReferences = owners(i.have.OwnerReferences, i)
	if !exists {
		err := c.Hub.Create(ctx, want, client.FieldOwner(kube.FieldManager))
		if apierrors.IsAlreadyExists(err) {
			// Another profile has changed it: read it again.
			return apierrors.NewConflict(configv1beta1.GroupVersion.WithResource("clusterconfigurations").GroupResource(), i.name.Name, err)
		}
		if err != nil {
			return err
		}
	} else if !equality.Semantic.DeepEqual(i.have.ObjectMeta, want.ObjectMeta) {
		if err := c.Hub.Update(ctx, want, client.FieldOwner(kube.FieldManager)); err != nil {
			return err
		}
	}
	if equality.Semantic.DeepEqual(i.have.Status, i.now) {
		return nil
	}
	want.Status = i.now
	return c.Hub.Status().Update(ctx, want, client.FieldOwner(kube.FieldManager))
}

// owners returns the owner references of an inventory: one per profile in it.
func owners(have []metav1.OwnerReference, i inventoryChange) []metav1.OwnerReference {
	same := func(r metav1.OwnerReference) bool { return r.Kind == i.owner.Kind && r.Name == i.owner.Name }
	now := slices.DeleteFunc(slices.Clone(have), same)
	if !listed(i.now, i.owner) {
		return now
	}
	reference := metav1.OwnerReference{APIVersion: i.owner.APIVersion, Kind: i.owner.Kind, Name: i.owner.Name, UID: i.owner.UID}
	if at := slices.IndexFunc(have, same); at >= 0 && have[at] == reference {
		return have
	}
	return append(now, reference)
}

func listed(s configv1beta1.ClusterConfigurationStatus, owner metav1.OwnerReference) bool {
	if owner.Kind == configv1beta1.ProfileKind {
		return slices.ContainsFunc(s.ProfileResources, func(r configv1beta1.ProfileResource) bool { return r.ProfileName == owner.Name })
	}
	return slices.ContainsFunc(s.ClusterProfileResources, func(r configv1beta1.ClusterProfileResource) bool {
		return r.ClusterProfileName == owner.Name
	})
}
