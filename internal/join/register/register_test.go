package register_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/localkube/faults"
)

// expectedLines are the lines of a registration that works.
func expectedLines(name string) []string {
	return []string{
		"[preflight] Running pre-flight checks",
		"[preflight] All pre-flight checks were passed",
		"[karmada-agent-start] Waiting to perform the TLS Bootstrap",
		"[karmada-agent-start] Waiting to check cluster exists",
		"[karmada-agent-start] Assign the necessary RBAC permissions to the agent",
		"[karmada-agent-start] Waiting to construct karmada-agent kubeconfig",
		"[karmada-agent-start] Waiting the necessary secret and RBAC",
		"[karmada-agent-start] Waiting karmada-agent Deployment",
		"",
		"cluster(" + name + ") is joined successfully",
	}
}

func TestRegisterAndUnregister(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, out, talk := w.request(t, "once")
	w.runAgent(t, "once")
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(expectedLines("once"), out.get()); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	if !talk.contains("is ready. status: Running") {
		t.Errorf("talk: got %q, want that the pod is ready", talk.get())
	}
	role := &rbacv1.ClusterRole{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: register.AgentRole("once")}, role); err != nil {
		t.Fatal(err)
	}
	if _, unfinished := role.Annotations["towline.dev/registration-unfinished"]; unfinished {
		t.Error("the registration is through and does not say so")
	}

	again, _, _ := w.request(t, "once")
	again.Member, again.DryRun = r.Member, true
	err := register.Register(t.Context(), again)
	var preflight *register.PreflightError
	if !errors.As(err, &preflight) {
		t.Fatalf("second registration: got %v, want a PreflightError", err)
	}
	want := []string{"once/karmada-kubeconfig Secret already exists", "once/karmada-agent-sa ServiceAccount already exists", "once/karmada-agent Deployment already exists"}
	if diff := cmp.Diff(want, preflight.Problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}

	// As the agents that elect one.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "once", Name: "karmada-agent-once"}}
	if err := w.admin.Create(t.Context(), lease); err != nil {
		t.Fatal(err)
	}
	// With the agent's own identity, and nothing but the cluster's kubeconfig.
	u := register.UnregisterRequest{
		Member: r.Member, ClusterName: "once", Namespace: "once", ClusterNamespace: r.ClusterNamespace, Timeout: time.Minute, Progress: talk.add,
	}
	if err := register.Unregister(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	w.awaitNoObjects(t, "once")
	u.Hub = w.plane.Config
	wantText(t, register.Unregister(t.Context(), u), "no cluster object once found in karmada control Plane")
}

func TestDryRunChangesNothing(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, out, _ := w.request(t, "dry")
	r.DryRun = true
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(expectedLines("dry")[:2], out.get()); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	if left := w.remaining(t, "dry"); len(left) > 0 {
		t.Errorf("made: %v", left)
	}
}

// requestFaults are the faults of one request. Each takes the registration's cancel function.
var requestFaults = map[string]func(cancel func()) faults.Effect{
	"lost":        func(func()) faults.Effect { return faults.LoseResponse },
	"interrupted": faults.Interrupt,
	"forbidden":   func(func()) faults.Effect { return faults.Forbid },
}

// minWrites is how many requests of a registration change the cluster at least: ClusterRole, Namespace, Secret,
// ServiceAccount, ClusterRoleBinding, Deployment, and the note that it is through.
const minWrites = 7

func TestRegisterRollsBackAfterAnyWrite(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	for kind, effect := range requestFaults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			name := "fault-" + kind
			w.runAgent(t, name)
			r, _, talk := w.request(t, name)
			member := r.Member
			for at := int64(1); ; at++ {
				ctx, cancel := context.WithCancel(t.Context())
				f := &faults.Fault{At: at, Effect: effect(cancel)}
				r.Member = f.On(member)
				err := register.Register(ctx, r)
				cancel()
				if f.Seen() < at && at > minWrites {
					if err != nil {
						t.Errorf("the try after %d failures: %v", at-1, err)
					}
					break
				}
				if err == nil {
					t.Fatalf("write %d: got no error", at)
				}
				if left := w.remaining(t, name); len(left) > 0 {
					t.Errorf("write %d: left: %v, after: %v", at, left, err)
				}
			}
			if !talk.contains("karmadactl register failed and started deleting the created resources") {
				t.Errorf("talk: got %q, want that it is taken back", talk.get())
			}
		})
	}
}

func TestInterruptionDuringCertificateRequestLeavesNoCluster(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, out, _ := w.request(t, "awaiting")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var watching sync.WaitGroup
	watching.Go(func() {
		defer cancel()
		_ = wait.PollUntilContextTimeout(ctx, 5*time.Millisecond, eventuallyTimeout, true, func(ctx context.Context) (bool, error) {
			csrs := &certificatesv1.CertificateSigningRequestList{}
			err := w.admin.List(ctx, csrs)
			return slices.ContainsFunc(csrs.Items, func(csr certificatesv1.CertificateSigningRequest) bool {
				return strings.HasPrefix(csr.Name, "awaiting-")
			}), err
		})
	})
	err := register.Register(ctx, r)
	watching.Wait()
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want that of the interruption", err)
	}
	if diff := cmp.Diff(expectedLines("awaiting")[:3], out.get()); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
	if left := w.remaining(t, "awaiting"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Also with another token.
	w.runAgent(t, "awaiting")
	r.Token = w.token(t, bootstrap.TokenOptions{TTL: time.Hour})
	if err := register.Register(t.Context(), r); err != nil {
		t.Errorf("second try: %v", err)
	}
}

func TestInterruptionReportsFailedRollback(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, talk := w.request(t, "stuck")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	member := r.Member
	r.Member = (&faults.Fault{At: 2, Effect: faults.Interrupt(cancel)}).On(member)
	r.Member = faults.Wrap(r.Member, func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		if request.Method == http.MethodDelete {
			return faults.Forbid(request, next)
		}
		return next.RoundTrip(request)
	})
	if err := register.Register(ctx, r); !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want that of the interruption", err)
	}
	if !talk.contains("warning: not everything could be taken back: ") {
		t.Errorf("talk: got %q", talk.get())
	}
	r.Member = member
	w.runAgent(t, "stuck")
	if err := register.Register(t.Context(), r); err != nil {
		t.Errorf("second try: %v", err)
	}
}

func TestRegisterRejectsTakenName(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	owner, _, _ := w.request(t, "taken")
	w.runAgent(t, "taken")
	if err := register.Register(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	before := &clusterv1alpha1.Cluster{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "taken"}, before); err != nil {
		t.Fatal(err)
	}
	thief, _, talk := w.request(t, "taken")
	thief.Namespace = "thief"
	err := register.Register(t.Context(), thief)
	wantText(t, err, "or the cluster name taken has been registered")
	var denied *bootstrap.DeniedError
	if !errors.As(err, &denied) || strings.Contains(err.Error(), "\n") {
		t.Errorf("error: got %q, want one line of a denial", err)
	}
	after := &clusterv1alpha1.Cluster{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "taken"}, after); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("cluster (-before +after):\n%s", diff)
	}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Name: "thief"}, &corev1.Namespace{}); err == nil {
		t.Error("the refused registration made its namespace")
	}
	if !talk.contains("started deleting") {
		t.Errorf("talk: %q", talk.get())
	}
}

func TestRegisterFailsForCrashingAgent(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, _ := w.request(t, "crash")
	w.breakPods(t, "crash", func(status *corev1.ContainerStatus) {
		status.Ready, status.RestartCount = false, 7
		status.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
		status.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error", Message: "no way to the hub"}
	})
	err := register.Register(t.Context(), r)
	wantText(t, err, "the agent does not start: pod karmada-agent-")
	wantText(t, err, "ended with exit code 1: Error: no way to the hub")
	w.awaitNoObjects(t, "crash")
}

func TestRegisterFailsForImagePullError(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, _ := w.request(t, "imageless")
	r.Image = "registry.example/agent:none"
	w.breakPods(t, "imageless", func(status *corev1.ContainerStatus) {
		status.Ready = false
		status.State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off pulling image: no such host"}}
	})
	began := time.Now()
	err := register.Register(t.Context(), r)
	wantText(t, err, "the agent does not start: pod karmada-agent-")
	wantText(t, err, ": the image registry.example/agent:none cannot be pulled (ImagePullBackOff: Back-off pulling image: no such host): pass --karmada-agent-image with an image that the cluster can pull")
	if took := time.Since(began); took < r.DiscoveryTimeout/10 {
		t.Errorf("it took %s, want that it is waited for a moment", took)
	}
	w.awaitNoObjects(t, "imageless")
}

// breakPods applies spoil to the container statuses of the pods in a namespace until the test ends.
func (w testEnv) breakPods(t *testing.T, namespace string, spoil func(*corev1.ContainerStatus)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			pods := &corev1.PodList{}
			_ = w.admin.List(ctx, pods, client.InNamespace(namespace))
			for i := range pods.Items {
				if pod := &pods.Items[i]; len(pod.Status.ContainerStatuses) > 0 {
					spoil(&pod.Status.ContainerStatuses[0])
					_ = w.admin.Status().Update(ctx, pod)
				}
			}
			return false, nil
		})
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}

func TestRenewReplacesTheCertificate(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t)
	r, _, talk := w.request(t, "renewed")
	w.runAgent(t, "renewed")
	r.Renew = true
	wantText(t, register.Register(t.Context(), r), "there is no agent in namespace renewed")
	r.Renew = false
	withOptions := r
	withOptions.Image, withOptions.Replicas, withOptions.Provider, withOptions.ClusterNamespace = "registry.example.com/towline:v1", 2, "aws", "inventory"
	if err := register.Register(t.Context(), withOptions); err != nil {
		t.Fatal(err)
	}
	options := w.agentSpec(t, "renewed")
	before := w.kubeconfig(t, "renewed")

	r.Renew, r.Token = true, w.token(t, bootstrap.TokenOptions{TTL: time.Hour, Cluster: "renewed"})
	member := r.Member
	for at := int64(1); at <= 2; at++ {
		f := &faults.Fault{At: at, Effect: faults.Forbid}
		r.Member = f.On(member)
		wantText(t, register.Register(t.Context(), r), "not you")
		if diff := cmp.Diff(before, w.kubeconfig(t, "renewed")); diff != "" {
			t.Fatalf("kubeconfig after a failure at write %d (-before +after):\n%s", at, diff)
		}
	}
	if !talk.contains("started restoring the agent's objects on the cluster") || talk.contains("deleting the created resources") {
		t.Errorf("got %q, want that objects are restored, and not deleted", talk.get())
	}
	r.Member = member
	if err := register.Register(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if w.kubeconfig(t, "renewed") == before {
		t.Error("the agent has the certificate that it had")
	}
	renewed := w.agentSpec(t, "renewed")
	const certificate = "towline.dev/certificate"
	if renewed.Template.Annotations[certificate] == options.Template.Annotations[certificate] {
		t.Error("the pods are not restarted")
	}
	renewed.Template.Annotations = options.Template.Annotations
	if diff := cmp.Diff(options, renewed); diff != "" {
		t.Errorf("options of the agent (-before +after):\n%s", diff)
	}
	other := r
	other.ClusterName = "another"
	wantText(t, register.Register(t.Context(), other), `has the agent of Cluster "renewed", not of another`)
}

// agentSpec returns the spec of the agent's Deployment in a namespace.
func (w testEnv) agentSpec(t *testing.T, namespace string) appsv1.DeploymentSpec {
	t.Helper()
	deployment := &appsv1.Deployment{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: register.DefaultAgentDeployment}, deployment); err != nil {
		t.Fatal(err)
	}
	return deployment.Spec
}

// kubeconfig returns the one of the agent in a namespace.
func (w testEnv) kubeconfig(t *testing.T, namespace string) string {
	t.Helper()
	secret := &corev1.Secret{}
	if err := w.admin.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: register.KubeconfigSecret}, secret); err != nil {
		t.Fatal(err)
	}
	return string(secret.Data[register.KubeconfigKey])
}

// setKubeconfig replaces the kubeconfig of the agent in a namespace.
func (w testEnv) setKubeconfig(t *testing.T, namespace string, kubeconfig []byte) {
	t.Helper()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: register.KubeconfigSecret}}
	before := secret.DeepCopy()
	secret.Data = map[string][]byte{register.KubeconfigKey: kubeconfig}
	if err := w.admin.Patch(t.Context(), secret, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

// kubeconfigOfUser returns a kubeconfig with the credentials of user, for a server whose certificate is signed by an
// authority of the hub or by one in authorities.
func (w testEnv) kubeconfigOfUser(t *testing.T, user *clientcmdapi.AuthInfo, server string, authorities []byte) []byte {
	t.Helper()
	kubeconfig, err := clientcmd.Write(clientcmdapi.Config{
		Clusters:  map[string]*clientcmdapi.Cluster{"c": {Server: server, CertificateAuthorityData: slices.Concat(w.plane.Config.CAData, authorities)}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"c": user},
		Contexts:  map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "c"}}, CurrentContext: "c",
	})
	if err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

// setUnfinished marks the registration of the agent in a namespace as unfinished.
func (w testEnv) setUnfinished(t *testing.T, namespace string) {
	t.Helper()
	role := &rbacv1.ClusterRole{}
	role.Name = register.AgentRole(namespace)
	patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"towline.dev/registration-unfinished":"true"}}}`))
	if err := w.admin.Patch(t.Context(), role, patch); err != nil {
		t.Fatal(err)
	}
}

func (w testEnv) delete(t *testing.T, namespace string, obj client.Object, name string) {
	t.Helper()
	obj.SetNamespace(namespace)
	obj.SetName(name)
	if err := w.admin.Delete(t.Context(), obj); err != nil {
		t.Fatal(err)
	}
}

// setReadyWithoutReport sets the Cluster to ready without a report of its agent: a registration succeeds, and its
// Cluster has no Kubernetes version.
func (w testEnv) setReadyWithoutReport(t *testing.T, name string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			cluster := &clusterv1alpha1.Cluster{}
			if w.admin.Get(ctx, client.ObjectKey{Name: name}, cluster) == nil {
				cluster.Status.Conditions = ready()
				return w.admin.Status().Update(ctx, cluster) == nil, nil
			}
			return false, nil
		})
	})
	t.Cleanup(func() { cancel(); running.Wait() })
}
