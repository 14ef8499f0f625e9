package join_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/faults"
)

const (
	allCreated = `namespace/projectsveltos created
serviceaccount/sveltos-applier-manager created
clusterrole.rbac.authorization.k8s.io/sveltos-applier-manager-role created
clusterrolebinding.rbac.authorization.k8s.io/sveltos-applier-manager-rolebinding created
service/sveltos-applier-metrics-service created
deployment.apps/sveltos-applier-manager created
secret/c-sveltos-kubeconfig created
`
	// againConfigured is the output for the same manifest with a new token.
	againConfigured = "secret/c-sveltos-kubeconfig configured\n"
)

// applied are the kinds and names of the manifest's objects, in order.
func applied() []struct {
	gvk  schema.GroupVersionKind
	name string
} {
	const rbac, manager = "rbac.authorization.k8s.io", "sveltos-applier-manager"
	return []struct {
		gvk  schema.GroupVersionKind
		name string
	}{
		{schema.GroupVersionKind{Version: "v1", Kind: "Namespace"}, kube.AgentNamespace},
		{schema.GroupVersionKind{Version: "v1", Kind: "ServiceAccount"}, manager},
		{schema.GroupVersionKind{Group: rbac, Version: "v1", Kind: "ClusterRole"}, manager + "-role"},
		{schema.GroupVersionKind{Group: rbac, Version: "v1", Kind: "ClusterRoleBinding"}, manager + "-rolebinding"},
		{schema.GroupVersionKind{Version: "v1", Kind: "Service"}, "sveltos-applier-metrics-service"},
		{schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "Deployment"}, manager},
		{schema.GroupVersionKind{Version: "v1", Kind: "Secret"}, "c-sveltos-kubeconfig"},
	}
}

// onMember returns the manifest's objects on the member, without the fields that the API server and controllers write.
func onMember(t *testing.T, memberClient client.Client) map[string]any {
	t.Helper()
	found := map[string]any{}
	for _, object := range applied() {
		obj := &unstructured.Unstructured{}
		obj.SetGroupVersionKind(object.gvk)
		err := memberClient.Get(t.Context(), client.ObjectKey{Namespace: kube.AgentNamespace, Name: object.name}, obj)
		if apierrors.IsNotFound(err) || (err == nil && obj.GetDeletionTimestamp() != nil) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		obj.SetManagedFields(nil)
		obj.SetResourceVersion("")
		obj.SetGeneration(0)
		unstructured.RemoveNestedField(obj.Object, "status")
		unstructured.RemoveNestedField(obj.Object, "metadata", "annotations", "deployment.kubernetes.io/revision")
		found[object.gvk.Kind] = obj.Object
	}
	return found
}

func member(t *testing.T) (*localkube.Plane, client.Client) {
	t.Helper()
	plane := localkube.ForTest(t, localkube.Named("member"))
	memberClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return plane, memberClient
}

// interceptRequests returns config with a transport that meddles with requests which write to a path with this end.
func interceptRequests(config *rest.Config, path string, meddle func(*http.Request, http.RoundTripper) (*http.Response, error)) *rest.Config {
	meddled := rest.CopyConfig(config)
	meddled.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return faults.RoundTripper(func(request *http.Request) (*http.Response, error) {
			if (request.Method == http.MethodPost || request.Method == http.MethodPatch) && strings.HasSuffix(request.URL.Path, path) {
				return meddle(request, next)
			}
			return next.RoundTrip(request)
		})
	})
	return meddled
}

func refuse(*http.Request, http.RoundTripper) (*http.Response, error) {
	return nil, errors.New("the line is cut")
}

// loseAnswer lets the request do its work and loses the answer.
func loseAnswer(request *http.Request, next http.RoundTripper) (*http.Response, error) {
	response, err := next.RoundTrip(request)
	if err == nil {
		err = errors.Join(errors.New("the line is cut"), response.Body.Close())
	}
	return nil, err
}

// TestRegisterAndApply runs on one member: a failure at every object, a success, failures with existing objects, and a
// success again.
func TestRegisterAndApply(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	memberPlane, memberClient := member(t)
	r := join.ApplyRequest{PullRequest: pullRequest(plane.Namespace(t, "apply"), "c"), Member: memberPlane.Config}
	hubBefore := inNamespace(t, hubClient, r.Namespace)

	fails := func(what string, config *rest.Config, ctx context.Context, want string) {
		t.Helper()
		before := onMember(t, memberClient)
		failing := r
		failing.Member = config
		failing.Options.Image = "another:image"
		failing.Labels = map[string]string{"another": "label"}
		var out bytes.Buffer
		_, err := join.RegisterAndApply(ctx, plane.Config, failing, &out)
		wantText(t, err, want)
		if out.Len() > 0 {
			t.Errorf("%s: printed %q", what, out.String())
		}
		eventually(t, what+": the member is as before", func() bool { return cmp.Equal(before, onMember(t, memberClient)) })
		if diff := cmp.Diff(hubBefore, inNamespace(t, hubClient, r.Namespace)); diff != "" {
			t.Errorf("%s: objects on the hub (-before +after):\n%s", what, diff)
		}
	}
	gone := func() {
		t.Helper()
		eventually(t, "the namespace is gone", func() bool {
			return apierrors.IsNotFound(memberClient.Get(t.Context(), client.ObjectKey{Name: kube.AgentNamespace}, &corev1.Namespace{}))
		})
	}
	fails("refused Namespace", interceptRequests(memberPlane.Config, "/namespaces", refuse), t.Context(), "the line is cut")
	fails("unanswered ClusterRole", interceptRequests(memberPlane.Config, "/clusterroles", loseAnswer), t.Context(), "the line is cut")
	gone()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	fails("interrupted", interceptRequests(memberPlane.Config, "/secrets", func(request *http.Request, next http.RoundTripper) (*http.Response, error) {
		cancel()
		return next.RoundTrip(request)
	}), ctx, "interrupted while registering cluster "+r.Namespace+"/c: write the manifest: apply to the cluster: write Secret projectsveltos/c-sveltos-kubeconfig; everything was taken back")
	gone()
	keepsANamespaceInUse(t, plane, memberClient, r)
	gone()

	succeeds(t, plane, r, allCreated)
	hubBefore = inNamespace(t, hubClient, r.Namespace)
	fails("refused Deployment", interceptRequests(memberPlane.Config, "/deployments/sveltos-applier-manager", refuse), t.Context(), "the line is cut")
	fails("unanswered Secret", interceptRequests(memberPlane.Config, "/secrets/c-sveltos-kubeconfig", loseAnswer), t.Context(), "the line is cut")
	succeeds(t, plane, r, strings.ReplaceAll(strings.TrimSuffix(allCreated, "secret/c-sveltos-kubeconfig created\n"), "created", "unchanged")+againConfigured)
	refusesAnothersAgent(t, plane, r)
	waitsUntilReady(t, plane, hubClient, r)
	refusesAnotherMember(t, plane, hubClient, r)
	waitsForAnAgentThatRemovesItself(t, plane, memberClient, r)
	waitsForAFormerAgent(t, plane, memberClient, r)
}

// keepsANamespaceInUse lets another hub register the member in push mode before the registration fails.
func keepsANamespaceInUse(t *testing.T, plane *localkube.Plane, memberClient client.Client, r join.ApplyRequest) {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "projectsveltos"}}
	r.Member = interceptRequests(r.Member, "/secrets", func(*http.Request, http.RoundTripper) (*http.Response, error) {
		return nil, errors.Join(errors.New("the line is cut"), memberClient.Create(t.Context(), account))
	})
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "the line is cut")
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}
	if err := memberClient.Get(t.Context(), client.ObjectKeyFromObject(namespace), namespace); err != nil || namespace.DeletionTimestamp != nil {
		t.Errorf("the namespace of the other hub: error %v, deleted at %v", err, namespace.DeletionTimestamp)
	}
	if len(onMember(t, memberClient)) > 1 {
		t.Errorf("left beside the namespace: %v", onMember(t, memberClient))
	}
	if err := memberClient.Delete(t.Context(), namespace); client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
}

// refusesAnotherMember lets an agent be at work on another member.
func refusesAnotherMember(t *testing.T, plane *localkube.Plane, hubClient client.Client, r join.ApplyRequest) {
	t.Helper()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name}}
	lease.Annotations = map[string]string{kube.AnnotationMember: "another"}
	// Its clock is behind.
	lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now().Add(-2 * time.Minute)}
	if err := hubClient.Patch(t.Context(), lease, client.MergeFrom(&coordinationv1.Lease{})); err != nil {
		t.Fatal(err)
	}
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "cluster "+r.Namespace+"/c is another cluster")
	wantText(t, err, "deregister it first or choose another name")
	patchStatus(t, hubClient, r.Namespace, `{"connectionStatus":"Down","agentCheckFailures":3,"failureMessage":"liveness check c: no"}`)
	_, err = join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "cluster "+r.Namespace+"/c is another cluster")
	patchStatus(t, hubClient, r.Namespace, `{"connectionStatus":"Down","failureMessage":"`+libv1beta1.AgentReportTooOld+`"}`)
	if _, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard); err != nil {
		t.Errorf("the other member is silent: %v", err)
	}
}

// patchStatus changes the status of cluster namespace/c as the hub and the agent do.
func patchStatus(t *testing.T, hubClient client.Client, namespace, status string) {
	t.Helper()
	patch := client.RawPatch("application/merge-patch+json", []byte(`{"status":`+status+`}`))
	if err := hubClient.Status().Patch(t.Context(), clusterNamed(t, hubClient, namespace, "c"), patch); err != nil {
		t.Fatal(err)
	}
}

// waitsForAnAgentThatRemovesItself makes an object of the agent a dependent of the ClusterRole, which still exists: so
// does an agent before it answers the hub, which ends the deregistration.
func waitsForAnAgentThatRemovesItself(t *testing.T, plane *localkube.Plane, memberClient client.Client, r join.ApplyRequest) {
	t.Helper()
	const name = "sveltos-applier-manager"
	role, account := &rbacv1.ClusterRole{}, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: name}}
	if err := memberClient.Get(t.Context(), client.ObjectKey{Name: name + "-role"}, role); err != nil {
		t.Fatal(err)
	}
	setOwners := func(owners string) {
		t.Helper()
		patch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"ownerReferences":[`+owners+`]}}`))
		if err := memberClient.Patch(t.Context(), account.DeepCopy(), patch); err != nil {
			t.Fatal(err)
		}
	}
	setOwners(fmt.Sprintf(`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","name":%q,"uid":%q}`, role.Name, role.UID))
	r.Wait = time.Second
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "a former agent is still being removed from the cluster: ServiceAccount projectsveltos/"+name)
	setOwners("")
}

// waitsForAFormerAgent lets the namespace of the former agent hang.
func waitsForAFormerAgent(t *testing.T, plane *localkube.Plane, memberClient client.Client, r join.ApplyRequest) {
	t.Helper()
	holder := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: "holder", Finalizers: []string{"example.com/hold"}}}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}
	if err := errors.Join(memberClient.Create(t.Context(), holder), memberClient.Delete(t.Context(), namespace)); err != nil {
		t.Fatal(err)
	}
	r.Wait = time.Second
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "a former agent is still being removed from the cluster")
	var said []string
	r.Wait = 20 * time.Second
	r.Progress = func(what string) {
		if said = append(said, what); len(said) == 1 {
			if err := memberClient.Patch(t.Context(), holder, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))); err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard); !errors.Is(err, join.ErrNotReady) {
		t.Errorf("got error %v, want %v", err, join.ErrNotReady)
	}
	if len(said) == 0 || !strings.Contains(said[0], "a former agent is still being removed") {
		t.Errorf("progress was %q", said)
	}
}

func succeeds(t *testing.T, plane *localkube.Plane, r join.ApplyRequest, want string) {
	t.Helper()
	var out bytes.Buffer
	if _, err := join.RegisterAndApply(t.Context(), plane.Config, r, &out); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("printed (-want +got):\n%s", diff)
	}
}

func refusesAnothersAgent(t *testing.T, plane *localkube.Plane, r join.ApplyRequest) {
	t.Helper()
	other := r
	other.Name = "other"
	_, err := join.RegisterAndApply(t.Context(), plane.Config, other, io.Discard)
	wantText(t, err, "the agent of "+r.Namespace+"/c runs on this cluster already")
	wantText(t, err, "kubectl delete clusterroles,clusterrolebindings -l app.kubernetes.io/name=sveltos-applier")
}

// waitsUntilReady plays the agent.
func waitsUntilReady(t *testing.T, plane *localkube.Plane, hubClient client.Client, r join.ApplyRequest) {
	t.Helper()
	key := client.ObjectKey{Namespace: r.Namespace, Name: r.Name}
	r.Wait = time.Second
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	if !errors.Is(err, join.ErrNotReady) {
		t.Errorf("got error %v, want %v", err, join.ErrNotReady)
	}
	wantText(t, err, "agent: ")
	wantText(t, err, "hub: the agent has not connected yet")

	var said []string
	r.Wait = time.Minute
	r.Progress = func(what string) {
		if said = append(said, what); len(said) > 1 {
			return
		}
		lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
		lease.Spec.RenewTime = &metav1.MicroTime{Time: time.Now()}
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: lease.ObjectMeta}
		cluster.Status = libv1beta1.SveltosClusterStatus{Ready: true, Version: "v1.2.3", ConnectionStatus: libv1beta1.ConnectionHealthy}
		if err := errors.Join(
			hubClient.Patch(t.Context(), lease, client.MergeFrom(&coordinationv1.Lease{})),
			hubClient.Status().Patch(t.Context(), cluster, client.MergeFrom(&libv1beta1.SveltosCluster{})),
		); err != nil {
			t.Error(err)
		}
	}
	version, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	if err != nil || version != "v1.2.3" || len(said) == 0 {
		t.Errorf("got version %q, error %v and progress %q", version, err, said)
	}
}

func TestRegisterAndApplyAsksTheClusterFirst(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := join.ApplyRequest{PullRequest: pullRequest(plane.Namespace(t, "asked"), "c"), Member: &rest.Config{Host: "https://127.0.0.1:1"}}
	before := inNamespace(t, hubClient, r.Namespace)
	_, err := join.RegisterAndApply(t.Context(), plane.Config, r, io.Discard)
	wantText(t, err, "the server https://127.0.0.1:1 cannot be reached")
	if diff := cmp.Diff(before, inNamespace(t, hubClient, r.Namespace)); diff != "" {
		t.Errorf("objects on the hub (-before +after):\n%s", diff)
	}
}
