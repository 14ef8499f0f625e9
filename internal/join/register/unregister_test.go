package register_test

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube/faults"
)

// registerCluster registers a cluster of that name and returns how to unregister it.
func (w testEnv) registerCluster(t *testing.T, name string) register.UnregisterRequest {
	t.Helper()
	r, _, _ := w.request(t, name)
	w.runAgent(t, name)
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	return register.UnregisterRequest{
		Member: r.Member, ClusterName: name, Namespace: name, ClusterNamespace: r.ClusterNamespace,
		Timeout: karmada.DefaultDeleteTimeout, Progress: func(string) {},
	}
}

func TestUnregisterRejectsAnotherCluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "mine")
	cases := map[string]struct {
		change func(*register.UnregisterRequest)
		want   string
	}{
		"other name":         {func(u *register.UnregisterRequest) { u.ClusterName = "other" }, "has the agent of Cluster mine, not of other"},
		"other name, by hub": {func(u *register.UnregisterRequest) { u.ClusterName, u.Hub = "other", w.plane.Config }, "no cluster object other found in karmada control Plane"},
		"other cluster":      {func(u *register.UnregisterRequest) { u.Member = w.configWithID(string(uuid.NewUUID())) }, "and the cluster of --cluster-kubeconfig has the ID"},
		"other namespace":    {func(u *register.UnregisterRequest) { u.Namespace = "nowhere" }, "--karmada-config"},
		"orphan":             {func(u *register.UnregisterRequest) { u.Orphan = true }, "--karmada-config"},
		"push": {
			func(u *register.UnregisterRequest) {
				u.ClusterName, u.Hub = "pushed", w.plane.Config
				pushed := &clusterv1alpha1.Cluster{Spec: clusterv1alpha1.ClusterSpec{SyncMode: clusterv1alpha1.Push}}
				pushed.Name = "pushed"
				if err := w.admin.Create(t.Context(), pushed); err != nil {
					t.Error(err)
				}
			},
			"cluster pushed is a Push mode member cluster, please use command `unjoin`",
		},
	}
	for name, c := range cases {
		r := u
		c.change(&r)
		if err := register.Unregister(t.Context(), r); err == nil {
			t.Errorf("%s: got no error", name)
		} else {
			wantText(t, err, c.want)
		}
	}
	u.DryRun = true
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "mine"}, &clusterv1alpha1.Cluster{}); err != nil {
		t.Errorf("the Cluster: %v", err)
	}
	if !w.isBound(t, "mine") {
		t.Error("the agent has lost its rights")
	}
}

func TestUnregisterCleansUpWithoutCluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "forgotten")
	w.delete(t, "", &clusterv1alpha1.Cluster{}, "forgotten")
	// The garbage collector deletes that, too, but may take a minute with a kind that is new to it.
	role := &rbacv1.ClusterRole{}
	role.Name = "system:karmada:forgotten:agent"
	if err := w.admin.Delete(t.Context(), role); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(w.kubeconfig(t, "forgotten")))
	if err != nil {
		t.Fatal(err)
	}
	agent, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if err := agent.Get(t.Context(), client.ObjectKey{Name: "forgotten"}, &clusterv1alpha1.Cluster{}); !apierrors.IsForbidden(err) {
			return fmt.Sprintf("the agent has its rights: it gets %v", err)
		}
		return ""
	})
	// The agent cannot know whether its Cluster was deleted.
	wantText(t, register.Unregister(t.Context(), u), "denies access to the agent of cluster forgotten")
	if left := w.remaining(t, "forgotten"); len(left) != 2 {
		t.Errorf("left: got %v, want what there was", left)
	}
	u.Hub = w.plane.Config
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	w.awaitNoObjects(t, "forgotten")
}

func TestUnregisterOfUnreachableCluster(t *testing.T) {
	t.Parallel()
	u := register.UnregisterRequest{Member: &rest.Config{Host: "https://127.0.0.1:1"}, ClusterName: "dead", Timeout: time.Minute}
	err := register.Unregister(t.Context(), u)
	wantText(t, err, "read Deployment apps karmada-system/karmada-agent on the cluster: ")
	wantText(t, err, "; if the cluster does not exist any more, delete its Cluster on the control plane: `kubectl delete cluster dead`")
}

func TestUnregisterDryRun(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "rehearsed")
	u.DryRun, u.Hub = true, w.plane.Config
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Error(err)
	}
	other := u
	other.Member = w.configWithID(string(uuid.NewUUID()))
	wantText(t, register.Unregister(t.Context(), other), "and the cluster of --cluster-kubeconfig has the ID")
	other = u
	other.ClusterName = "nosuch"
	wantText(t, register.Unregister(t.Context(), other), "no cluster object nosuch found in karmada control Plane")
	w.delete(t, "", &clusterv1alpha1.Cluster{}, "rehearsed")
	var reported string
	u.Progress = func(line string) { reported += line + "\n" }
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Errorf("what the control plane forgot: %v", err)
	}
	if want := "; without --dry-run, unregister deletes the remaining objects"; !strings.Contains(reported, want) {
		t.Errorf("progress: got %q, want %q", reported, want)
	}
	if left := w.remaining(t, "rehearsed"); len(left) != 2 {
		t.Errorf("left: got %v, want what there was", left)
	}
}

func TestUnregisterDeletesTheInventoryNamespace(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "elsewhere")
	records := &corev1.Namespace{}
	records.Name, records.Labels = u.ClusterNamespace, map[string]string{clusterv1alpha1.SystemLabel: "true"}
	if err := w.admin.Create(t.Context(), records); err != nil {
		t.Fatal(err)
	}
	// The command leaves the namespace empty without its flag.
	u.ClusterNamespace = ""
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	w.awaitNoObjects(t, "elsewhere")
}

func TestUnregisterKeepsObjectsOfAnotherHub(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "ours")
	// Another hub joins the same cluster in push mode, and has its things where our agent has its records.
	other := karmada.JoinRequest{
		Hub: w.configWithID(string(uuid.NewUUID())), Member: w.configWithID(string(uuid.NewUUID())), Name: "theirs", ClusterNamespace: u.ClusterNamespace,
	}
	if err := karmada.Join(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	left := []client.Object{&corev1.ServiceAccount{}, &corev1.ServiceAccount{}, &corev1.Secret{}, &corev1.Namespace{}, &rbacv1.ClusterRole{}, &rbacv1.ClusterRoleBinding{}}
	for i, name := range []string{"karmada-theirs", "karmada-impersonator", "karmada-theirs", u.ClusterNamespace, "karmada-controller-manager:karmada-theirs", "karmada-controller-manager:karmada-theirs"} {
		key := client.ObjectKey{Name: name}
		if i < 3 {
			key.Namespace = u.ClusterNamespace
		}
		if err := w.admin.Get(t.Context(), key, left[i]); err != nil || left[i].GetDeletionTimestamp() != nil {
			t.Errorf("%T %s: got error %v and deletion at %v, want that it stays", left[i], key, err, left[i].GetDeletionTimestamp())
		}
	}
	if left := w.remaining(t, "ours"); !slices.Equal(left, []string{"Namespace-records"}) {
		t.Errorf("left of ours: %v", left)
	}
}

func TestUnregisterKeepsNamespaceInUse(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	for name, wanted := range map[string]int{"in-use": 1, "unused": 0} {
		u := w.registerCluster(t, name)
		records := &corev1.Namespace{}
		records.Name, records.Labels = u.ClusterNamespace, map[string]string{clusterv1alpha1.SystemLabel: "true"}
		if err := w.admin.Create(t.Context(), records); err != nil {
			t.Fatal(err)
		}
		if wanted > 0 {
			account := &corev1.ServiceAccount{}
			account.Namespace, account.Name, account.Labels = u.ClusterNamespace, "karmada-theirs", records.Labels
			if err := w.admin.Create(t.Context(), account); err != nil {
				t.Fatal(err)
			}
		}
		if err := register.Unregister(t.Context(), u); err != nil {
			t.Fatal(err)
		}
		if left := w.remaining(t, name); len(left) != wanted {
			t.Errorf("%s: left: %v, want the namespace only where it is in use", name, left)
		}
	}
}

func TestUnregisterReportsTimeout(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "slow")
	cluster := &clusterv1alpha1.Cluster{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "slow"}, cluster); err != nil {
		t.Fatal(err)
	}
	held := cluster.DeepCopy()
	held.Finalizers = append(held.Finalizers, "towline.dev/test")
	if err := w.admin.Patch(t.Context(), held, client.MergeFrom(cluster)); err != nil {
		t.Fatal(err)
	}
	u.Timeout = 3 * time.Second
	began := time.Now()
	err := register.Unregister(t.Context(), u)
	took := time.Since(began)
	if err == nil || !strings.HasPrefix(err.Error(), "it took longer than 3s: delete the cluster object slow: ") || !strings.HasSuffix(err.Error(), "; the control plane goes on with it, and the command can be run again") {
		t.Errorf("got error %v", err)
	}
	if took < u.Timeout {
		t.Errorf("it waited %s, want %s", took, u.Timeout)
	}
	if left := w.remaining(t, "slow"); len(left) != 2 {
		t.Errorf("left: got %v, want what there was, but for the Cluster, which goes", left)
	}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "slow"}, held); err != nil {
		t.Fatal(err)
	}
	held.Finalizers = nil
	if err := w.admin.Update(t.Context(), held); err != nil {
		t.Fatal(err)
	}
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Error(err)
	}
	w.awaitNoObjects(t, "slow")
}

func TestUnregisterContinuesAfterInterruption(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "halfway")
	member := u.Member
	// The annotation of the Secret, and the first deletions.
	for at := int64(1); at <= 5; at++ {
		f := &faults.Fault{At: at, Effect: faults.Forbid}
		if at%2 == 0 {
			f.Effect = faults.LoseResponse
		}
		u.Member = f.On(member)
		if err := register.Unregister(t.Context(), u); err == nil {
			break
		}
	}
	u.Member = member
	// Unregister needs only the cluster's kubeconfig while the Secret with the hub's kubeconfig exists. It is deleted
	// last.
	if err := register.Unregister(t.Context(), u); err != nil {
		wantText(t, err, "there is no Secret halfway/karmada-kubeconfig")
	}
	w.awaitNoObjects(t, "halfway")
}

func TestUnregisterEndsIfHubDoesNotAnswer(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	u := w.registerCluster(t, "mute")
	// It accepts connections, and does not respond.
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	u.Hub = &rest.Config{Host: "https://" + listener.Addr().String(), TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	u.Timeout = 2 * time.Second
	began := time.Now()
	wantText(t, register.Unregister(t.Context(), u), "it took longer than 2s")
	if took := time.Since(began); took > 12*time.Second {
		t.Errorf("it took %s", took)
	}
	if left := w.remaining(t, "mute"); len(left) != 3 {
		t.Errorf("left: got %v, want everything", left)
	}
}
