package attacks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
)

// TestAgentDrivesTheHub: an agent changes its status very often, so that the hub would render its content as often. It
// also writes large values, which would fill the memory of the hub.
func TestAgentDrivesTheHub(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	cluster := w.pullCluster(tenant, "edge")
	w.noError(tenant.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content", Annotations: map[string]string{libv1beta1.TemplateAnnotation: "ok"}},
		Data: map[string]string{"a": `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "default"},
			"data": {"cluster": "{{ .Cluster.status.version }}-{{ get .Cluster.status ` + "`apiVersions`" + ` }}"}}`},
	}))
	w.createProfile(tenant, "content", func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}}
	})
	group := w.awaitGroup(w.ns, func() {})
	agent := w.agentClient(fleet.FromSveltosCluster(cluster))
	w.reportFailures(agent, group, func() {})
	w.awaitFailure("content", hasTexts(lastFailure))

	renderings := w.changeVersions(group, func(i int) {
		before := cluster.DeepCopy()
		cluster.Status.Version, cluster.Status.APIVersions = fmt.Sprintf("v1.34.%d", i), []string{fmt.Sprintf("attack%d/v1", i)}
		w.noError(agent.Status().Patch(t.Context(), cluster, client.MergeFrom(before)))
	})
	if renderings < 2 {
		t.Errorf("%d changes of the version caused %d renderings", reports, renderings)
	}
	w.awaitRendered(w.ns, fmt.Sprintf("v1.34.%d-[attack%[1]d/v1]", reports-1), func() {})

	before := cluster.DeepCopy()
	cluster.Status.Version = strings.Repeat("1", 1<<20)
	if err := agent.Status().Patch(t.Context(), cluster, client.MergeFrom(before)); !apierrors.IsInvalid(err) {
		t.Errorf("a version of a megabyte: %.200v", err)
	}
}

// TestKarmadaAgentDrivesTheHub is TestAgentDrivesTheHub with the certificate of the agent of a Cluster. The agent also
// renews its Lease very often.
func TestKarmadaAgentDrivesTheHub(t *testing.T) {
	w := newWorld(t)
	cluster, agent := w.karmadaCluster(w.ns + "-edge")
	m := fleet.FromCluster(cluster)
	report := func(status string) error {
		return agent.Status().Patch(t.Context(), cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status":`+status+`}`)))
	}
	renew := func() {
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.DeliveryNamespace, Name: m.Name}}
		now := time.Now().UTC().Format(metav1.RFC3339Micro)
		w.noError(agent.Patch(t.Context(), lease, client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"renewTime":%q,"holderIdentity":"pod"}}`, now))))
		w.noError(report(`{"conditions":[{"type":"Ready","status":"True","reason":"ClusterReady","message":"ok","lastTransitionTime":"2026-01-01T00:00:00Z"}]}`))
	}
	w.noError(report(`{"kubernetesVersion":"v1.34.0"}`))
	w.noError(w.Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content", Annotations: map[string]string{libv1beta1.TemplateAnnotation: "ok"}},
		Data: map[string]string{"a": `{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "default"},
			"data": {"cluster": "{{ .Cluster.status.kubernetesVersion }}"}}`},
	}))
	profile := &configv1beta1.ClusterProfile{ObjectMeta: metav1.ObjectMeta{Name: w.ns}, Spec: configv1beta1.ProfileSpec{
		ClusterRefs: []corev1.ObjectReference{fleet.Reference(m)},
		PolicyRefs:  []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: w.ns, Name: "content"}},
	}}
	w.noError(w.Create(t.Context(), profile))
	w.Cleanup(func() { _ = w.Delete(context.WithoutCancel(t.Context()), profile) }) // its members keep it
	group := w.awaitGroup(m.DeliveryNamespace, renew)
	w.reportFailures(agent, group, renew)
	w.changeVersions(group, func(i int) {
		renew()
		w.noError(report(fmt.Sprintf(`{"kubernetesVersion":"v1.34.%d"}`, i+1)))
	})
	w.awaitRendered(m.DeliveryNamespace, fmt.Sprintf("v1.34.%d", reports), renew)

	var resources []string
	for i := range 1001 {
		resources = append(resources, fmt.Sprintf("%q:%q", fmt.Sprint("example.com/", i), "1"))
	}
	if err := report(`{"resourceSummary":{"allocatable":{` + strings.Join(resources, ",") + `}}}`); !apierrors.IsInvalid(err) {
		t.Errorf("a thousand resources: %.200v", err)
	}
	if err := report(`{"resourceSummary":{"allocated":{"cpu":"` + strings.Repeat("1", 1<<20) + `"}}}`); !apierrors.IsInvalid(err) {
		t.Errorf("a quantity of a megabyte: %.200v", err)
	}
	zones := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"zones":["eu"`+strings.Repeat(`,"eu"`, 1000)+`]}}`))
	if err := agent.Patch(t.Context(), cluster.DeepCopy(), zones); !apierrors.IsInvalid(err) {
		t.Errorf("a thousand zones: %.200v", err)
	}
}

// reports is the number of changes of an attacking agent. lastFailure is the message of its last report.
const (
	reports     = 150
	lastFailure = "attack 149"
)

// awaitGroup waits for the only group in a namespace. It calls each in every check.
func (w *world) awaitGroup(namespace string, each func()) *libv1beta1.ConfigurationGroup {
	w.Helper()
	groups := &libv1beta1.ConfigurationGroupList{}
	w.eventually("the content is delivered", func() error {
		each()
		if err := w.List(w.Context(), groups, client.InNamespace(namespace)); err != nil || len(groups.Items) == 1 {
			return err
		}
		return fmt.Errorf("%d groups", len(groups.Items))
	})
	return &groups.Items[0]
}

// reportFailures has an agent report a different failure of a group each time, and checks the number of reconciles.
func (w *world) reportFailures(agent client.Client, group *libv1beta1.ConfigurationGroup, each func()) {
	w.Helper()
	written := w.countWrites(group.Spec.SourceRef.Namespace)
	for i := range reports {
		before := group.DeepCopy()
		group.Status = libv1beta1.ConfigurationGroupStatus{
			DeploymentStatus: libv1beta1.FeatureStatusFailed, FailureMessage: fmt.Sprintf("attack %d", i),
			ObservedGeneration: group.Generation, ObservedRequestorHash: group.Spec.RequestorHash,
		}
		w.noError(agent.Status().Patch(w.Context(), group, client.MergeFrom(before)))
		each()
		select {
		case <-time.After(50 * time.Millisecond):
		case <-w.Context().Done():
		}
	}
	// A reconcile writes the status. The attack takes at least 8 s: 20 reports in a burst, then one in each 6 s.
	if n := written.Load(); n < 2 || n > reports/2 {
		w.Errorf("%d reports caused %d reconciles", reports, n)
	}
}

// changeVersions has an agent change the version of its cluster, and checks the number of renderings. A rendering with
// another version changes the group. It returns the number.
func (w *world) changeVersions(group *libv1beta1.ConfigurationGroup, change func(i int)) int64 {
	w.Helper()
	w.noError(w.Get(w.Context(), client.ObjectKeyFromObject(group), group))
	first := group.Generation
	for i := range reports {
		change(i)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-w.Context().Done():
		}
	}
	w.noError(w.Get(w.Context(), client.ObjectKeyFromObject(group), group))
	n := group.Generation - first
	if n > reports/2 {
		w.Errorf("%d changes of the version caused %d renderings", reports, n)
	}
	return n
}

// awaitRendered waits until the content in a namespace has a text. It calls each in every check.
func (w *world) awaitRendered(namespace, text string, each func()) {
	w.Helper()
	w.eventually("the content is rendered with the last version", func() error {
		each()
		var rendered strings.Builder
		for _, content := range w.awaitBundles(namespace) {
			frame, err := zstd.NewReader(bytes.NewReader(content.Spec.Payload))
			w.noError(err)
			_, err = frame.WriteTo(&rendered)
			frame.Close()
			w.noError(err)
		}
		return wantText(rendered.String(), text)
	})
}

// karmadaCluster registers a Cluster in pull mode, and returns a client with the certificate of its agent.
func (w *world) karmadaCluster(name string) (*clusterv1alpha1.Cluster, client.Client) {
	w.Helper()
	w.noError(bootstrap.EnsureHubObjects(w.Context(), w.hub.Config, join.HubAddress{Server: w.hub.Config.Host, CA: w.hub.Config.CAData}))
	token, err := bootstrap.CreateToken(w.Context(), w, bootstrap.TokenOptions{TTL: time.Hour})
	w.noError(err)
	config := rest.AnonymousClientConfig(w.hub.Config)
	config.BearerToken = token.String()
	w.eventually("the hub accepts the token", func() error {
		return w.clientFor(config).Create(w.Context(), &authenticationv1.SelfSubjectReview{})
	})
	ctx, cancel := context.WithTimeout(w.Context(), waitTimeout)
	defer cancel()
	certificate, err := bootstrap.RequestCertificate(ctx, config, bootstrap.CertificateRequest{Cluster: name, ID: name, Lifetime: time.Hour})
	w.noError(err)
	config = rest.AnonymousClientConfig(w.hub.Config)
	config.CertData, config.KeyData = certificate.CertPEM, certificate.KeyPEM
	agent, cluster := w.clientFor(config), &clusterv1alpha1.Cluster{}
	w.eventually("the agent of "+name+" has its rights", func() error {
		return errors.Join(
			agent.Get(w.Context(), client.ObjectKey{Name: name}, cluster),
			agent.Get(w.Context(), client.ObjectKey{Namespace: fleet.ExecutionSpace(name), Name: name}, &coordinationv1.Lease{}))
	})
	w.Cleanup(func() { _ = w.Delete(context.WithoutCancel(w.Context()), cluster) }) // its agent does not remove itself
	return cluster, agent
}

// TestAgentDrivesItsRegistration: an agent changes between Down and Healthy very often, so that the hub would check the
// objects of its registration as often. It also changes its status very often while it is deregistered.
func TestAgentDrivesItsRegistration(t *testing.T) {
	w := newWorld(t)
	cluster := w.pullCluster(w.tenant(), "edge")
	agent := w.agentClient(fleet.FromSveltosCluster(cluster))
	report := func(status string) {
		t.Helper()
		w.noError(agent.Status().Patch(t.Context(), cluster.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(status))))
		select {
		case <-time.After(50 * time.Millisecond):
		case <-t.Context().Done():
		}
	}
	role := "/apis/rbac.authorization.k8s.io/v1/namespaces/" + w.ns + "/roles/edge"
	checks := func() int { return hubRequests.count(http.MethodGet, role) }
	first := checks()
	const changes = 150
	for i := range changes {
		connection := []libv1beta1.ConnectionStatus{libv1beta1.ConnectionDown, libv1beta1.ConnectionHealthy}[i%2]
		report(fmt.Sprintf(`{"status":{"ready":%t,"connectionStatus":%q,"failureMessage":"registering: %d"}}`, i%2 == 1, connection, i))
	}
	// The attack takes at least 8 s: 20 changes in a burst, then one in each 6 s.
	if n := checks() - first; n < 2 || n > changes/2 {
		t.Errorf("%d changes caused %d checks of the registration", changes, n)
	}
	w.eventually("the cluster is healthy", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); err != nil {
			return err
		}
		if s := cluster.Status; !s.Ready || s.ConnectionStatus != libv1beta1.ConnectionHealthy || s.FailureMessage != "" {
			return fmt.Errorf("its status is %+v", s)
		}
		return nil
	})

	w.noError(w.Delete(t.Context(), cluster))
	reads := func() int {
		return hubRequests.count(http.MethodGet, "/apis/"+libv1beta1.GroupVersion.String()+"/namespaces/"+w.ns+"/sveltosclusters/edge")
	}
	first = reads()
	for i := range changes {
		report(fmt.Sprintf(`{"status":{"failureMessage":"attack %d"}}`, i))
	}
	if n := reads() - first; n < 2 || n > changes/2 {
		t.Errorf("%d changes during the deregistration caused %d reads of the cluster", changes, n)
	}
	report(fmt.Sprintf(`{"status":{"agentRemovedAt":%q}}`, time.Now().UTC().Format(time.RFC3339)))
	w.eventually("the cluster is deregistered", func() error {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster); !apierrors.IsNotFound(err) {
			return fmt.Errorf("its status is %+v: %w", cluster.Status, err)
		}
		return nil
	})
}

// countWrites counts the changes of the ClusterSummaries in a namespace.
func (w *world) countWrites(namespace string) *atomic.Int32 {
	w.Helper()
	watching, err := client.NewWithWatch(w.hub.Config, client.Options{Scheme: kube.Scheme()})
	w.noError(err)
	events, err := watching.Watch(w.Context(), &configv1beta1.ClusterSummaryList{}, client.InNamespace(namespace))
	w.noError(err)
	w.Cleanup(events.Stop)
	count := &atomic.Int32{}
	go func() {
		for e := range events.ResultChan() {
			if e.Type == watch.Modified {
				count.Add(1)
			}
		}
	}()
	return count
}
