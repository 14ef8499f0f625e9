package hub_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
)

// stubAgent renews the Lease of a cluster, reports every group as provisioned, and records the groups that request a
// removal.
type stubAgent struct {
	hub client.WithWatch

	mu       sync.Mutex // guards removals
	removals []string
}

// startAgent runs a stubAgent of a cluster, on all groups of the world's namespace, until the test ends.
func (w *world) startAgent(cluster string) *stubAgent {
	w.Helper()
	hubClient, err := client.NewWithWatch(w.plane.Config, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	groups, err := hubClient.Watch(w.Context(), &libv1beta1.ConfigurationGroupList{}, client.InNamespace(w.ns))
	w.must(err)
	a := &stubAgent{hub: hubClient}
	ctx, cancel := context.WithCancel(w.Context())
	var ended sync.WaitGroup
	ended.Go(func() {
		for e := range groups.ResultChan() {
			if group, ok := e.Object.(*libv1beta1.ConfigurationGroup); ok && e.Type != watch.Deleted {
				a.report(w, group)
			}
		}
	})
	ended.Go(func() {
		wait.UntilWithContext(ctx, func(ctx context.Context) { a.renew(ctx, client.ObjectKey{Namespace: w.ns, Name: cluster}) }, 5*time.Second)
	})
	w.Cleanup(func() {
		cancel()
		groups.Stop()
		ended.Wait()
	})
	return a
}

// renew renews the Lease. After an error the next call does so.
func (a *stubAgent) renew(ctx context.Context, lease client.ObjectKey) {
	stored := &coordinationv1.Lease{}
	if err := a.hub.Get(ctx, lease, stored); err != nil {
		return
	}
	stored.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
	_ = a.hub.Update(ctx, stored)
}

func (a *stubAgent) report(w *world, group *libv1beta1.ConfigurationGroup) {
	status := libv1beta1.FeatureStatusProvisioned
	if group.Spec.Action == libv1beta1.ActionRemove {
		a.mu.Lock()
		a.removals = append(a.removals, group.Name)
		a.mu.Unlock()
		status = libv1beta1.FeatureStatusRemoved
	}
	if group.Status.ObservedGeneration == group.Generation && group.Status.DeploymentStatus == status {
		return
	}
	before := group.DeepCopy()
	now := metav1.Now()
	group.Status.DeploymentStatus, group.Status.LastAppliedTime = status, &now
	group.Status.ObservedGeneration, group.Status.ObservedRequestorHash = group.Generation, group.Spec.RequestorHash
	err := a.hub.Status().Patch(w.Context(), group, client.MergeFrom(before))
	if client.IgnoreNotFound(err) != nil && w.Context().Err() == nil {
		w.Error(err)
	}
}

func (a *stubAgent) deleteCluster() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.removals
}

// countShardLabels returns the number of objects in the namespace of the world by their kind and label, and reads the
// cluster.
func (w *world) countShardLabels(cluster *libv1beta1.SveltosCluster) (map[string]int, error) {
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
		return nil, err
	}
	all := map[string]int{}
	for kind, list := range map[string]client.ObjectList{
		"summary": &configv1beta1.ClusterSummaryList{}, "group": &libv1beta1.ConfigurationGroupList{}, "configuration": &configv1beta1.ClusterConfigurationList{},
	} {
		if err := w.List(w.Context(), list, client.InNamespace(w.ns)); err != nil {
			return nil, err
		}
		items, err := meta.ExtractList(list)
		if err != nil {
			return nil, err
		}
		for _, item := range items {
			all[kind+" "+item.(client.Object).GetLabels()[fleet.LabelShard]]++
		}
	}
	return all, nil
}

// wantShard waits until a change of the content is deployed, and all objects have the label of the shard.
func (w *world) wantShard(cluster *libv1beta1.SveltosCluster, profiles []client.Object, shard string) {
	w.Helper()
	w.eventually("shard "+shard+" has all objects", func() error {
		got, err := w.countShardLabels(cluster)
		if err != nil {
			return err
		}
		if labelled := fleet.Shard(shard).SeesAll(cluster); !labelled {
			return fmt.Errorf("the annotations of the cluster are %v", cluster.Annotations)
		}
		want := map[string]int{"summary " + shard: len(profiles), "group " + shard: len(profiles), "configuration " + shard: 1}
		return checkEqual(want, got)
	})
	for _, profile := range profiles {
		w.wantProvisioned(profile, cluster.Name)
	}
}

// changeContent changes the content of all profiles, and waits until all groups request it.
func (w *world) changeContent(cm *corev1.ConfigMap, profiles []client.Object, member, name string) {
	w.Helper()
	hashes := func() map[string]string {
		all := map[string]string{}
		for _, profile := range profiles {
			summary, err := w.getSummary(profile, member)
			if err != nil || len(summary.Status.FeatureSummaries) == 0 {
				continue
			}
			all[profile.GetName()] = string(summary.Status.FeatureSummaries[0].Hash)
		}
		return all
	}
	before := hashes()
	update(w, cm, func(cm *corev1.ConfigMap) { cm.Data["content"] = manifest(name) })
	w.eventually("all profiles deploy "+name, func() error {
		after := hashes()
		for profile, hash := range before {
			if after[profile] == hash || after[profile] == "" {
				return fmt.Errorf("profile %s is not deployed again", profile)
			}
		}
		return nil
	})
}

// move changes the shard of a cluster.
func (w *world) move(cluster *libv1beta1.SveltosCluster, shard string) {
	w.Helper()
	update(w, cluster, func(c *libv1beta1.SveltosCluster) {
		if shard == "" {
			delete(c.Annotations, libv1beta1.ShardAnnotation)
			return
		}
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, libv1beta1.ShardAnnotation, shard)
	})
}

// listGroupUIDs returns the UIDs of all groups: a group that is deleted and created again has another UID.
func (w *world) listGroupUIDs() map[string]string {
	w.Helper()
	var groups libv1beta1.ConfigurationGroupList
	w.must(w.List(w.Context(), &groups, client.InNamespace(w.ns)))
	uids := map[string]string{}
	for i := range groups.Items {
		uids[groups.Items[i].Name] = string(groups.Items[i].UID)
	}
	return uids
}

// newShardedWorld is a world with the hubs of the default shard, a and b, and a pull member in a with two profiles.
func newShardedWorld(t *testing.T) (w *world, cluster *libv1beta1.SveltosCluster, profiles []client.Object) {
	t.Helper()
	w = newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	cache := t.TempDir()
	for _, shard := range []string{"", "a", "b"} {
		w.start(w.plane.Config, hub.Options{ShardKey: shard, CacheDir: cache})
	}
	cluster = w.createMember("one", w.prodLabels())
	w.move(cluster, "a")
	w.renewLease(cluster, time.Now())
	w.setReady(cluster)
	w.createConfigMap("manifests", manifest("first"))
	return w, cluster, []client.Object{w.createProfile(nil), w.createProfile(nil)}
}

// TestClusterMovesBetweenShards moves a pull cluster with two profiles from shard a to b, back to a, and to the
// default shard. Each hub deploys changes, and nothing is removed.
func TestClusterMovesBetweenShards(t *testing.T) {
	w, cluster, profiles := newShardedWorld(t)
	agent := w.startAgent(cluster.Name)
	cm := &corev1.ConfigMap{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "manifests"}, cm))
	w.wantShard(cluster, profiles, "a")
	uids := w.listGroupUIDs()
	for _, shard := range []string{"b", "a", "", "b"} {
		w.move(cluster, shard)
		w.changeContent(cm, profiles, cluster.Name, "moved-to-"+shard+"x")
		w.wantShard(cluster, profiles, shard)
	}
	if err := checkEqual(uids, w.listGroupUIDs()); err != nil {
		t.Errorf("groups were created again: %v", err)
	}
	if removed := agent.deleteCluster(); len(removed) > 0 {
		t.Errorf("the agent was requested to remove %v", removed)
	}
	// The hub of the last shard withdraws the profiles.
	for _, profile := range profiles {
		w.must(w.Delete(t.Context(), profile))
		w.wantNoSummary(profile, cluster.Name)
	}
	if removed := agent.deleteCluster(); len(removed) < len(profiles) {
		t.Errorf("the agent was requested to remove %v, want all", removed)
	}
}

// TestObjectsWithoutShardLabelAreAdopted has objects of a Towline release without shard labels, and later a summary
// whose label a user deletes.
func TestObjectsWithoutShardLabelAreAdopted(t *testing.T) {
	w, cluster, profiles := newShardedWorld(t)
	agent := w.startAgent(cluster.Name)
	w.wantShard(cluster, profiles, "a")
	uids := w.listGroupUIDs()
	unlabel := func(obj client.Object) {
		w.Helper()
		before := obj.DeepCopyObject().(client.Object)
		fleet.Shard("").SetLabel(obj)
		w.must(client.IgnoreNotFound(w.Patch(t.Context(), obj, client.MergeFrom(before))))
	}
	var groups libv1beta1.ConfigurationGroupList
	w.must(w.List(t.Context(), &groups, client.InNamespace(w.ns)))
	for i := range groups.Items {
		unlabel(&groups.Items[i])
	}
	for _, profile := range profiles {
		summary, err := w.getSummary(profile, cluster.Name)
		w.must(err)
		unlabel(summary)
	}
	update(w, cluster, func(c *libv1beta1.SveltosCluster) { delete(c.Annotations, kube.AnnotationLabelledShard) })
	w.wantShard(cluster, profiles, "a")

	// The default hub watches the summary without its label.
	summary, err := w.getSummary(profiles[0], cluster.Name)
	w.must(err)
	unlabel(summary)
	w.wantShard(cluster, profiles, "a")
	cm := &corev1.ConfigMap{}
	w.must(w.Get(t.Context(), client.ObjectKey{Namespace: w.ns, Name: "manifests"}, cm))
	w.changeContent(cm, profiles, cluster.Name, "changed")
	if err := checkEqual(uids, w.listGroupUIDs()); err != nil {
		t.Errorf("groups were created again: %v", err)
	}
	if removed := agent.deleteCluster(); len(removed) > 0 {
		t.Errorf("the agent was requested to remove %v", removed)
	}
}

// TestSummaryOfDeletedClusterInAnotherShard removes a cluster of a shard without a hub by force. The default hub,
// whose cache has a part of its summary, removes the summary's finalizer.
func TestSummaryOfDeletedClusterInAnotherShard(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	w.start(w.plane.Config, hub.Options{Transports: newShardTransport().transports()})
	w.createConfigMap("manifests", manifest("a"))
	cluster := w.createShardMember("unserved", "one")
	profile := w.createProfile(nil)
	w.eventually("a summary", func() error {
		summary, err := w.getSummary(profile, "one")
		if err != nil {
			return err
		}
		if summary.Labels[fleet.LabelShard] != "unserved" {
			return errors.New("no label of the shard")
		}
		return nil
	})
	w.must(w.Delete(t.Context(), cluster))
	w.must(w.Delete(t.Context(), profile))
	w.wantNoSummary(profile, "one")
	w.eventually("the profile is deleted", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(profile), profile); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the summary exists: %w", err)
		}
		return nil
	})
}
