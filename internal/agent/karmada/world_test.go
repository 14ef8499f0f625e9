package karmada

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	workv1alpha1 "github.com/towline/towline/api/work/v1alpha1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/register"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// clusters is the hub and the member that all tests share. Each test has its own Cluster and namespaces.
type clusters struct {
	hub, member             *localkube.Plane
	hubClient, memberClient client.Client
	hubID, memberID         string
}

var shared = sync.OnceValues(func() (*clusters, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	p := &clusters{}
	var starting sync.WaitGroup
	var errs [2]error
	for i, plane := range []**localkube.Plane{&p.hub, &p.member} {
		starting.Go(func() { *plane, errs[i] = localkube.Start(ctx, localkube.Options{Name: []string{"hub", "member"}[i]}) })
	}
	starting.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	var err error
	if p.hubClient, p.hubID, err = clientOf(ctx, p.hub); err != nil {
		return nil, err
	}
	if p.memberClient, p.memberID, err = clientOf(ctx, p.member); err != nil {
		return nil, err
	}
	return p, p.installHub(ctx)
})

func clientOf(ctx context.Context, plane *localkube.Plane) (client.Client, string, error) {
	c, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, "", err
	}
	system := &corev1.Namespace{}
	err = c.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, system)
	return c, string(system.UID), err
}

// installHub creates the CRDs and namespaces of a hub.
func (p *clusters) installHub(ctx context.Context) error {
	if err := crds.Install(ctx, p.hubClient); err != nil {
		return err
	}
	return p.hubClient.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}})
}

// world is a registration of the member: a Cluster, and the Secret with the agent's kubeconfig for the hub.
type world struct {
	*clusters
	t              *testing.T
	name           string
	agentNamespace string // the agent's namespace
	options        Options
	requestRecorder
}

// newWorld registers the member with a name and a certificate of this lifetime.
func newWorld(t *testing.T, name string, lifetime time.Duration) *world {
	t.Helper()
	p, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{clusters: p, t: t, name: name, agentNamespace: "agent-" + name}
	w.options = Defaults()
	w.options.Member, w.options.Cluster, w.options.HubSecret = p.member.Config, name, w.agentNamespace+"/"+register.KubeconfigSecret
	w.options.ClusterNamespace, w.options.ElectNamespace = "records-"+name, w.agentNamespace
	w.options.HealthAddress, w.options.MetricsAddress, w.options.LeaderElect = "", "", false
	w.options.wrapHubTransport = w.wrap
	w.options.Identity = "test"
	w.createCluster(w.memberID)
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: w.agentNamespace, Labels: map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: name},
	}}
	if err := p.memberClient.Create(t.Context(), namespace); err != nil {
		t.Fatal(err)
	}
	w.writeKubeconfig(w.kubeconfig(w.issueCertificate(lifetime)))
	return w
}

// createCluster creates the Cluster, and grants the agent its permissions.
func (w *world) createCluster(id string) {
	w.t.Helper()
	cluster := &clusterv1alpha1.Cluster{ObjectMeta: metav1.ObjectMeta{Name: w.name, Annotations: map[string]string{kube.AnnotationHub: w.hubID}}}
	cluster.Spec.ID, cluster.Spec.SyncMode = id, clusterv1alpha1.Pull
	if err := w.hubClient.Create(w.t.Context(), cluster); err != nil {
		w.t.Fatal(err)
	}
	if err := bootstrap.EnsureAgentRBAC(w.t.Context(), w.hubClient, cluster); err != nil {
		w.t.Fatal(err)
	}
}

// issueCertificate gets a certificate for the agent from the hub.
func (w *world) issueCertificate(lifetime time.Duration) bootstrap.Certificate {
	w.t.Helper()
	stop := w.approveRequests()
	defer stop()
	made, err := bootstrap.RequestCertificate(w.t.Context(), w.hub.Config, bootstrap.CertificateRequest{
		Cluster: w.name, ID: w.memberID, Lifetime: lifetime, Until: time.Now().Add(time.Minute),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return made
}

// approveRequests approves the agent's certificate requests like the hub, until stop is called.
func (w *world) approveRequests() (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			w.approvePending(ctx)
			return false, nil
		})
	}()
	return func() { cancel(); <-done }
}

func (w *world) approvePending(ctx context.Context) {
	csrs := &certificatesv1.CertificateSigningRequestList{}
	if err := w.hubClient.List(ctx, csrs); err != nil {
		return
	}
	for i := range csrs.Items {
		csr := &csrs.Items[i]
		if len(csr.Status.Conditions) > 0 || !strings.HasPrefix(csr.Name, w.name+"-") {
			continue
		}
		if err := bootstrap.EnsureCSRReadRBAC(ctx, w.hubClient, csr); err != nil && ctx.Err() == nil {
			w.t.Error(err)
		}
		csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{
			Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test",
		}}
		if err := w.hubClient.SubResource("approval").Update(ctx, csr); err != nil && ctx.Err() == nil {
			w.t.Error(err)
		}
	}
}

// kubeconfig returns a kubeconfig for the hub with a certificate.
func (w *world) kubeconfig(made bootstrap.Certificate) []byte {
	w.t.Helper()
	config := clientcmdapi.NewConfig()
	config.Clusters["hub"] = &clientcmdapi.Cluster{Server: w.hub.Config.Host, CertificateAuthorityData: w.hub.Config.CAData}
	config.AuthInfos[w.name] = &clientcmdapi.AuthInfo{ClientCertificateData: made.CertPEM, ClientKeyData: made.KeyPEM}
	config.Contexts["hub"] = &clientcmdapi.Context{Cluster: "hub", AuthInfo: w.name}
	config.CurrentContext = "hub"
	text, err := clientcmd.Write(*config)
	if err != nil {
		w.t.Fatal(err)
	}
	return text
}

// writeKubeconfig writes a kubeconfig into the Secret.
func (w *world) writeKubeconfig(kubeconfig []byte) {
	w.t.Helper()
	secret := w.secret()
	labels := map[string]string{clusterv1alpha1.SystemLabel: "true", register.RegistrationLabel: w.name}
	if secret.UID == "" {
		secret = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.agentNamespace, Name: register.KubeconfigSecret, Labels: labels},
			Data:       map[string][]byte{register.KubeconfigKey: kubeconfig},
		}
		if err := w.memberClient.Create(w.t.Context(), secret); err != nil {
			w.t.Fatal(err)
		}
		return
	}
	secret.Data[register.KubeconfigKey] = kubeconfig
	if err := w.memberClient.Update(w.t.Context(), secret); err != nil {
		w.t.Fatal(err)
	}
}

// secret returns the Secret with the kubeconfig, or an empty Secret if it does not exist.
func (w *world) secret() *corev1.Secret {
	w.t.Helper()
	secret := &corev1.Secret{}
	err := w.memberClient.Get(w.t.Context(), client.ObjectKey{Namespace: w.agentNamespace, Name: register.KubeconfigSecret}, secret)
	if client.IgnoreNotFound(err) != nil {
		w.t.Fatal(err)
	}
	return secret
}

// startAgent starts the agent. ended receives the result of Run; stop ends the agent and waits.
func (w *world) startAgent(change ...func(*Options)) (ended <-chan error, stop func(), logs *logRecorder) {
	w.t.Helper()
	options := w.options
	for _, f := range change {
		f(&options)
	}
	logs = &logRecorder{}
	ctx, cancel := context.WithCancel(log.IntoContext(w.t.Context(), logs.logger()))
	result, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		result <- Run(ctx, options)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			w.t.Error("the agent did not end")
		}
		if w.t.Failed() {
			w.t.Logf("the agent's log:\n%s", strings.Join(logs.linesWith(""), "\n"))
		}
	})
	w.t.Cleanup(stop)
	return result, stop, logs
}

func (w *world) cluster() *clusterv1alpha1.Cluster {
	w.t.Helper()
	cluster := &clusterv1alpha1.Cluster{}
	if err := w.hubClient.Get(w.t.Context(), client.ObjectKey{Name: w.name}, cluster); err != nil {
		w.t.Fatal(err)
	}
	return cluster
}

func (w *world) patchCluster(patch string) {
	w.t.Helper()
	if err := w.hubClient.Patch(w.t.Context(), w.cluster(), client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) lease(ctx context.Context) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{}
	return lease, w.hubClient.Get(ctx, client.ObjectKey{Namespace: fleet.ExecutionSpace(w.name), Name: w.name}, lease)
}

// wantLeader waits until the agent with this identity is the leader, and its heartbeats reach the hub.
func (w *world) wantLeader(want string) {
	w.t.Helper()
	is := func(lease *coordinationv1.Lease, err error) error {
		if err == nil && (lease.Spec.HolderIdentity == nil || *lease.Spec.HolderIdentity != want) {
			err = fmt.Errorf("the holder is %q", ptr.Deref(lease.Spec.HolderIdentity, ""))
		}
		return err
	}
	w.eventually(want+" is the leader", func(ctx context.Context) error {
		lease := &coordinationv1.Lease{}
		return is(lease, w.memberClient.Get(ctx, client.ObjectKey{Namespace: w.agentNamespace, Name: electionName(w.name)}, lease))
	})
	w.eventually("heartbeats of "+want, func(ctx context.Context) error { return is(w.lease(ctx)) })
}

// freeAddress returns an address that is not in use.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// wantProbe waits until a probe by the kubelet gets this status code.
func (w *world) wantProbe(address, path string, want int) {
	w.t.Helper()
	// The default timeoutSeconds of a probe.
	kubelet := &http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	w.eventually(fmt.Sprintf("%s answers %d", path, want), func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, nil)
		if err != nil {
			return err
		}
		response, err := kubelet.Do(request)
		if err != nil {
			return err
		}
		defer func() { _ = response.Body.Close() }()
		body, err := io.ReadAll(response.Body)
		if err == nil && response.StatusCode != want {
			err = fmt.Errorf("the response is %d: %s", response.StatusCode, body)
		}
		return err
	})
}

// wantReady waits until the Cluster is Ready.
func (w *world) wantReady() {
	w.t.Helper()
	w.eventually("the Cluster is Ready", w.hasReadyStatus(metav1.ConditionTrue))
}

// hasReadyStatus returns a check of the condition Ready.
func (w *world) hasReadyStatus(want metav1.ConditionStatus) func(context.Context) error {
	return func(context.Context) error {
		if got := readyStatus(&w.cluster().Status); got != string(want) {
			return fmt.Errorf("Ready is %q", got)
		}
		return nil
	}
}

// lastHeartbeat returns the time of the last heartbeat by the agent's clock.
func (w *world) lastHeartbeat() time.Time {
	w.t.Helper()
	lease, err := w.lease(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	if lease.Spec.RenewTime == nil {
		return time.Time{}
	}
	return lease.Spec.RenewTime.Time
}

// createWork creates a Work with one ConfigMap in namespace default of the member.
func (w *world) createWork(name, value string) {
	w.t.Helper()
	manifest, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"namespace": "default", "name": w.name + "-" + name}, "data": map[string]any{"key": value},
	})
	if err != nil {
		w.t.Fatal(err)
	}
	work := &workv1alpha1.Work{ObjectMeta: metav1.ObjectMeta{
		Namespace: fleet.ExecutionSpace(w.name), Name: name, Finalizers: []string{workv1alpha1.ExecutionFinalizer},
	}}
	work.Spec.Workload.Manifests = []workv1alpha1.Manifest{{RawExtension: runtime.RawExtension{Raw: manifest}}}
	if err := w.hubClient.Create(w.t.Context(), work); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) getWork(name string) (*workv1alpha1.Work, error) {
	work := &workv1alpha1.Work{}
	return work, w.hubClient.Get(w.t.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(w.name), Name: name}, work)
}

func (w *world) configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: w.name + "-" + name}}
}

// wantValue waits until the ConfigMap on the member has value.
func (w *world) wantValue(name, value string) {
	w.t.Helper()
	w.eventually("ConfigMap "+name+" holds "+value, func(ctx context.Context) error {
		got := w.configMap(name)
		if err := w.memberClient.Get(ctx, client.ObjectKeyFromObject(got), got); err != nil {
			return err
		}
		if got.Data["key"] != value {
			return fmt.Errorf("the value is %q", got.Data["key"])
		}
		return nil
	})
}

// wantDeleted waits until an object is deleted. For a namespace the beginning of the deletion is enough, because the
// deletion takes Kubernetes more than five seconds.
func (w *world) wantDeleted(c client.Client, obj client.Object) {
	w.t.Helper()
	w.eventually(fmt.Sprintf("%T %s is deleted", obj, obj.GetName()), func(ctx context.Context) error {
		err := c.Get(ctx, client.ObjectKeyFromObject(obj), obj)
		if _, namespace := obj.(*corev1.Namespace); namespace && err == nil && obj.GetDeletionTimestamp() != nil {
			return nil
		}
		if err == nil {
			return errors.New("it exists")
		}
		return client.IgnoreNotFound(err)
	})
}

// eventually fails the test unless check succeeds within a minute.
func (w *world) eventually(condition string, check func(context.Context) error) {
	w.t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(w.t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		w.t.Fatalf("wait until %s: %v; last seen: %v", condition, err, last)
	}
}

// letPass waits, so that an unwanted action of the agent can happen.
func (w *world) letPass(pause time.Duration) {
	done, cancel := context.WithTimeout(w.t.Context(), pause)
	defer cancel()
	<-done.Done()
}
