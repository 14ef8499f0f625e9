package bootstrap_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
)

// newClusterWithRBAC creates a Cluster in pull mode with the RBAC of its agent.
func newClusterWithRBAC(t *testing.T, hubClient client.Client, name string) *clusterv1alpha1.Cluster {
	t.Helper()
	c := &clusterv1alpha1.Cluster{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"env": "prod"}},
		Spec:       clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull, ID: "id-of-" + name},
	}
	if err := hubClient.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := bootstrap.EnsureAgentRBAC(t.Context(), hubClient, c); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func newWork(t *testing.T, hubClient client.Client, cluster string) *workv1alpha1.Work {
	t.Helper()
	w := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{
		Namespace: "karmada-es-" + cluster, Name: "w", Finalizers: []string{workv1alpha1.ExecutionFinalizer, "example.com/other"},
	}}
	w.Spec.Workload.Manifests = []workv1alpha1.Manifest{{RawExtension: runtime.RawExtension{Raw: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","namespace":"default"}}`)}}}
	if err := hubClient.Create(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	return w
}

func TestAgentPermissions(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "own")
	newClusterWithRBAC(t, hubClient, "neighbour")
	config := agentConfig(plane.Config, "own")
	everywhere := []string{
		"certificatesigningrequests/selfclusteragent[][create]", "certificatesigningrequests[][create]",
		"clusters/status[own][get patch]", "clusters[own][get list watch patch delete]",
	}
	inSpace := append([]string{
		"configurationbundles[][get]", "configurationgroups/status[][get patch]", "configurationgroups[][get list watch]",
		"leases[own][get update patch]", "secrets[own-sveltos-content-key][get]", "works/status[][get patch]", "works[][get list watch patch]",
	}, everywhere...)
	slices.Sort(inSpace)
	for namespace, want := range map[string][]string{
		"karmada-es-own": inSpace, "karmada-es-neighbour": everywhere, "default": everywhere, "kube-system": everywhere,
		"projectsveltos": append(slices.Clone(everywhere), "configurationbundles[][get]"),
	} {
		slices.Sort(want)
		wantRules(t, config, namespace, want)
	}
}

func TestAgentCannotChangeAnotherCluster(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "thief")
	victim := newClusterWithRBAC(t, hubClient, "victim")
	work := newWork(t, hubClient, "victim")
	agent := clientOf(t, agentConfig(plane.Config, "thief"))
	own := &clusterv1alpha1.Cluster{}
	eventually(t, func() string {
		if err := agent.Get(t.Context(), client.ObjectKey{Name: "thief"}, own); err != nil {
			return err.Error()
		}
		return ""
	})
	const space = "karmada-es-victim"
	merge := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"a":"b"}}}`))
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "victim"}}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "victim"}}
	group := &libv1beta1.ConfigurationGroup{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "g"}}
	objects := []client.Object{
		&clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "victim"}}, lease, work, secret, group,
		&libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "b"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: "s"}},
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-cluster", Name: "cluster-id-" + victim.Spec.ID}},
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: karmada.AgentRoleName("victim")}},
	}
	for _, obj := range objects {
		copied := func() client.Object { return obj.DeepCopyObject().(client.Object) }
		for verb, err := range map[string]error{
			"get":    agent.Get(t.Context(), client.ObjectKeyFromObject(obj), copied()),
			"patch":  agent.Patch(t.Context(), copied(), merge),
			"status": agent.Status().Patch(t.Context(), copied(), merge),
			"update": agent.Update(t.Context(), copied()),
			"delete": agent.Delete(t.Context(), copied()),
		} {
			if !apierrors.IsForbidden(err) {
				t.Errorf("%s %T %s: %v", verb, obj, obj.GetName(), err)
			}
		}
	}
	for _, list := range []client.ObjectList{
		&clusterv1alpha1.ClusterList{}, &workv1alpha1.WorkList{}, &libv1beta1.ConfigurationGroupList{}, &libv1beta1.ConfigurationBundleList{}, &corev1.SecretList{},
	} {
		if err := agent.List(t.Context(), list); !apierrors.IsForbidden(err) {
			t.Errorf("list %T: %v", list, err)
		}
	}
	another := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "another"}, Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Pull}}
	if err := agent.Create(t.Context(), another); !apierrors.IsForbidden(err) {
		t.Errorf("create a Cluster: %v", err)
	}
}

func TestAgentWatchesItsOwnCluster(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "watcher")
	agent := clientOf(t, agentConfig(plane.Config, "watcher"))
	self := client.MatchingFields{"metadata.name": "watcher"}
	clusters := &clusterv1alpha1.ClusterList{}
	eventually(t, func() string {
		if err := agent.List(t.Context(), clusters, self); err != nil || len(clusters.Items) != 1 {
			return fmt.Sprint(len(clusters.Items), err)
		}
		return ""
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	watching, err := agent.Watch(ctx, &clusterv1alpha1.ClusterList{}, self)
	if err != nil {
		t.Fatal(err)
	}
	defer watching.Stop()
	select {
	case event := <-watching.ResultChan():
		if c, ok := event.Object.(*clusterv1alpha1.Cluster); !ok || c.Name != "watcher" {
			t.Errorf("watched %+v", event)
		}
	case <-ctx.Done():
		t.Error("watched nothing")
	}
	if _, err := agent.Watch(ctx, &clusterv1alpha1.ClusterList{}); !apierrors.IsForbidden(err) {
		t.Errorf("watch all Clusters: %v", err)
	}
	if err := agent.List(ctx, &workv1alpha1.WorkList{}, client.InNamespace("karmada-es-watcher")); err != nil {
		t.Errorf("list Works: %v", err)
	}
}

// updateCase is a write to one object, and whether an agent may make it.
type updateCase struct {
	of    func(member string) client.Object
	patch string
	allow bool
}

func updateCases() map[string]updateCase {
	cluster := func(name string) client.Object {
		return &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	work := func(name string) client.Object {
		return &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: "w"}}
	}
	lease := func(name string) client.Object {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-" + name, Name: name}}
	}
	const owner = `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"y"}]}}`
	return map[string]updateCase{
		"cluster: what it is": {cluster, `{"spec":{"apiEndpoint":"https://10.0.0.1:6443","proxyURL":"http://proxy:3128","provider":"p","region":"r","zones":["a","b"]}}`, true},
		"cluster: again":      {cluster, `{"spec":{"apiEndpoint":null,"zones":["c"]}}`, true},
		"cluster: label":      {cluster, `{"metadata":{"labels":{"env":"stage"}}}`, false},
		"cluster: no label":   {cluster, `{"metadata":{"labels":null}}`, false},
		"cluster: annotation": {cluster, `{"metadata":{"annotations":{"towline.dev/deregister":"force"}}}`, false},
		"cluster: finalizer":  {cluster, `{"metadata":{"finalizers":["example.com/x"]}}`, false},
		"cluster: owner":      {cluster, owner, false},
		"cluster: mode":       {cluster, `{"spec":{"syncMode":"Push"}}`, false},
		"cluster: id":         {cluster, `{"spec":{"id":"another"}}`, false},
		"cluster: no id":      {cluster, `{"spec":{"id":null}}`, false},
		"cluster: secret":     {cluster, `{"spec":{"secretRef":{"namespace":"kube-system","name":"x"}}}`, false},
		"cluster: imperson.":  {cluster, `{"spec":{"impersonatorSecretRef":{"namespace":"kube-system","name":"x"}}}`, false},
		"cluster: insecure":   {cluster, `{"spec":{"insecureSkipTLSVerification":true}}`, false},
		"cluster: header":     {cluster, `{"spec":{"proxyHeader":{"a":"b"}}}`, false},
		"cluster: taints":     {cluster, `{"spec":{"taints":[{"key":"a","effect":"NoSchedule"}]}}`, false},
		"cluster: models":     {cluster, `{"spec":{"resourceModels":[{"grade":0,"ranges":[]}]}}`, false},
		"cluster: zone":       {cluster, `{"spec":{"zone":"z","zones":null}}`, false},
		"cluster: all":        {cluster, `{"spec":{"apiEndpoint":"https://x","id":"another"}}`, false},
		"work: spec":          {work, `{"spec":{"suspendDispatching":true}}`, false},
		"work: label":         {work, `{"metadata":{"labels":{"a":"b"}}}`, false},
		"work: annotation":    {work, `{"metadata":{"annotations":{"a":"b"}}}`, false},
		"work: owner":         {work, owner, false},
		"work: new finalizer": {work, `{"metadata":{"finalizers":["karmada.io/execution-controller","example.com/other","example.com/x"]}}`, false},
		"work: another's":     {work, `{"metadata":{"finalizers":["karmada.io/execution-controller"]}}`, false},
		"work: no finalizer":  {work, `{"metadata":{"finalizers":null}}`, false},
		"lease: heartbeat":    {lease, `{"metadata":{"annotations":{"towline.dev/agent-order":"removed"}},"spec":{"holderIdentity":"a","renewTime":"2026-01-02T03:04:05.000000Z"}}`, true},
		"lease: owner":        {lease, owner, false},
		"lease: finalizer":    {lease, `{"metadata":{"finalizers":["example.com/x"]}}`, false},
		"lease: label":        {lease, `{"metadata":{"labels":{"a":"b"}}}`, false},
	}
}

func TestAgentPolicyRestrictsFields(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "held")
	newWork(t, hubClient, "held")
	agent := clientOf(t, agentConfig(plane.Config, "held"))
	send := func(c client.Client, tc updateCase, o ...client.PatchOption) error {
		return c.Patch(t.Context(), tc.of("held"), client.RawPatch("application/merge-patch+json", []byte(tc.patch)), o...)
	}
	all := updateCases()
	// The API server enforces a policy some moments after it is written.
	eventually(t, func() string {
		if err := send(agent, all["work: label"], client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Sprint(err)
		}
		if err := send(agent, all["cluster: what it is"], client.DryRunAll); err != nil {
			return err.Error()
		}
		return ""
	})
	for name, tc := range all {
		err := send(agent, tc)
		if tc.allow && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !tc.allow && !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("%s was not refused: %v", name, err)
		}
		if name == "lease: owner" || name == "cluster: owner" || name == "work: owner" {
			continue // an owner that does not exist would take the object with it
		}
		if err := send(hubClient, tc, client.DryRunAll); err != nil {
			t.Errorf("%s by an administrator: %v", name, err)
		}
	}
}

func TestAgentReplacesTheZoneByZones(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	c := newClusterWithRBAC(t, hubClient, "zoned")
	c.Spec.Zone = "a"
	if err := hubClient.Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	agent := clientOf(t, agentConfig(plane.Config, "zoned"))
	send := func(patch string, o ...client.PatchOption) error {
		return agent.Patch(t.Context(), c.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch)), o...)
	}
	eventually(t, func() string {
		if err := send(`{"spec":{"zone":"b"}}`, client.DryRunAll); !apierrors.IsForbidden(err) {
			return fmt.Sprint("another zone: ", err)
		}
		if err := send(`{"spec":{"provider":"p"}}`); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := send(`{"spec":{"zone":null,"zones":["a"]}}`); err != nil {
		t.Error(err)
	}
	if err := send(`{"spec":{"zone":"a","zones":null}}`); !apierrors.IsForbidden(err) {
		t.Errorf("a zone again: %v", err)
	}
}

func TestAgentFinishesAWork(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "finisher")
	work := newWork(t, hubClient, "finisher")
	agent := clientOf(t, agentConfig(plane.Config, "finisher"))
	eventually(t, func() string {
		if err := agent.Get(t.Context(), client.ObjectKeyFromObject(work), work); err != nil {
			return err.Error()
		}
		return ""
	})
	reported := work.DeepCopy()
	reported.Status.Conditions = []metav1.Condition{{Type: "Applied", Status: "True", Reason: "AppliedSuccessful", LastTransitionTime: metav1.Now()}}
	if err := agent.Status().Patch(t.Context(), reported, client.MergeFrom(work)); err != nil {
		t.Fatal(err)
	}
	freed := reported.DeepCopy()
	freed.Finalizers = []string{"example.com/other"}
	if err := agent.Patch(t.Context(), freed, client.MergeFromWithOptions(reported, client.MergeFromWithOptimisticLock{})); err != nil {
		t.Fatal(err)
	}
}

func TestAgentPolicyCoversStatusUpdates(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	newClusterWithRBAC(t, hubClient, "detour")
	newWork(t, hubClient, "detour")
	agent := clientOf(t, agentConfig(plane.Config, "detour"))
	const metadata = `{"metadata":{"labels":{"env":"stage"},"annotations":{"a":"b"},"finalizers":["example.com/x"],"ownerReferences":[]},"spec":{"id":"x","suspendDispatching":true}}`
	for _, obj := range []client.Object{
		&clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: "detour"}},
		&workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{Namespace: "karmada-es-detour", Name: "w"}},
	} {
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), obj); err != nil {
			t.Fatal(err)
		}
		after := obj.DeepCopyObject().(client.Object)
		eventually(t, func() string {
			if err := agent.Status().Patch(t.Context(), after, client.RawPatch("application/merge-patch+json", []byte(metadata))); err != nil {
				return err.Error()
			}
			return ""
		})
		if err := hubClient.Get(t.Context(), client.ObjectKeyFromObject(obj), after); err != nil {
			t.Fatal(err)
		}
		for _, o := range []client.Object{obj, after} {
			o.SetManagedFields(nil)
			o.SetResourceVersion("")
		}
		if diff := cmp.Diff(after, obj); diff != "" {
			t.Errorf("%T changed (-got +want):\n%s", obj, diff)
		}
	}
}

func TestEnsureAgentRBACKeepsTheLease(t *testing.T) {
	t.Parallel()
	_, hubClient := hub(t)
	c := newClusterWithRBAC(t, hubClient, "renamed")
	lease := &coordinationv1.Lease{}
	key := client.ObjectKey{Namespace: "karmada-es-renamed", Name: "renamed"}
	if err := hubClient.Get(t.Context(), key, lease); err != nil {
		t.Fatal(err)
	}
	if got := ptr.Deref(lease.Spec.LeaseDurationSeconds, 0); got != 40 || karmada.Owner(lease) != c.Name {
		t.Errorf("duration %d, labels %v", got, lease.Labels)
	}
	before := lease.UID
	if err := bootstrap.EnsureAgentRBAC(t.Context(), hubClient, c); err != nil {
		t.Fatal(err)
	}
	if err := hubClient.Get(t.Context(), key, lease); err != nil || lease.UID != before {
		t.Errorf("a second EnsureAgentRBAC replaced the Lease: %v", err)
	}
}
