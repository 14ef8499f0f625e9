package approvals_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/hub/approvals"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

var errKilled = errors.New("the hub has crashed")

// crashingClient returns a client that makes this many writes, and then no further request, as if its process had been
// killed.
func (w *testEnv) crashingClient(writes int) client.Client {
	w.Helper()
	// It has the RBAC of config/hub.yaml.
	cfg := rest.CopyConfig(w.config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: hubUser}
	live, err := client.NewWithWatch(cfg, client.Options{Scheme: kube.Scheme()})
	w.must(err)
	spend := func() error {
		if writes--; writes < 0 {
			return errKilled
		}
		return nil
	}
	return interceptor.NewClient(live, interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
			if writes < 0 {
				return errKilled
			}
			return c.Get(ctx, key, obj, opts...)
		},
		Create: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.Create(ctx, obj, opts...)
		},
		Update: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.Update(ctx, obj, opts...)
		},
		Delete: func(ctx context.Context, c client.WithWatch, obj client.Object, opts ...client.DeleteOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.Delete(ctx, obj, opts...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.Patch(ctx, obj, patch, opts...)
		},
		Apply: func(ctx context.Context, c client.WithWatch, obj runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.Apply(ctx, obj, opts...)
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, obj client.Object, opts ...client.SubResourceUpdateOption) error {
			if err := spend(); err != nil {
				return err
			}
			return c.SubResource(sub).Update(ctx, obj, opts...)
		},
	})
}

// hubUser is a user with the RBAC of config/hub.yaml.
const hubUser = "towline-hub"

// grantHubRBAC grants hubUser the RBAC in the hub's manifest, and prepares the hub as that user.
func (w *testEnv) grantHubRBAC() error {
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "config", "hub.yaml"))
	if err != nil {
		return err
	}
	for part := range bytes.SplitSeq(raw, []byte("\n---\n")) {
		rights := &rbacv1.ClusterRole{}
		if err := yaml.Unmarshal(part, rights); err != nil {
			return err
		}
		if rights.Kind == "ClusterRole" && rights.Name == "towline-hub" {
			err = errors.Join(err, w.Create(w.Context(), rights))
		}
	}
	err = errors.Join(err, w.Create(w.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: hubUser},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "towline-hub"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: hubUser}},
	}))
	cfg := rest.CopyConfig(w.config)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: hubUser}
	w.eventually(func() string {
		if err := bootstrap.EnsureHubObjects(w.Context(), cfg, join.HubAddress{Server: cfg.Host, CA: cfg.CAData}); err != nil {
			return err.Error()
		}
		return ""
	})
	w.awaitPolicy()
	return err
}

// awaitPolicy waits until the policy for agents is not new.
func (w *testEnv) awaitPolicy() {
	w.Helper()
	w.eventually(func() string {
		if isNew, err := bootstrap.EnsureAgentPolicy(w.Context(), w); err != nil || isNew {
			return fmt.Sprint("the policy is new: ", isNew, ", error ", err)
		}
		return ""
	})
}

// run reconciles the request with a controller that makes at most this many writes, at the time now.
func (w *testEnv) run(name string, writes int, now time.Time) error {
	w.Helper()
	c := &approvals.Controller{Hub: cmp.Or[client.Client](w.cached, w), Live: w.crashingClient(writes), Events: events.NewFakeRecorder(100), Clock: clocktesting.NewFakeClock(now)}
	_, err := c.Reconcile(w.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Name: name}})
	return err
}

// createRequest creates the request of a token's holder to register a cluster, which waits a minute for the answer.
func (w *testEnv) createRequest(t *testing.T, token bootstrap.Token, name string) {
	t.Helper()
	csr := certificateRequest(t, name, pkix.Name{CommonName: bootstrap.AgentUser(name), Organization: []string{bootstrap.AgentsGroup}})
	csr.Annotations[kube.AnnotationUntil] = time.Now().Add(time.Minute).Format(time.RFC3339)
	w.must(w.agent(w.tokenConfig(token)).Create(t.Context(), csr))
}

// manyWrites is more than an answer needs.
const manyWrites = 100

func TestHubMayCrashAtAnyTime(t *testing.T) {
	t.Parallel()
	plane := localkube.ForTest(t, localkube.Named("mortal"))
	if err := errors.Join(installAPIs(t.Context(), plane.Config), newTestEnvOn(t, plane).grantHubRBAC()); err != nil {
		t.Fatal(err)
	}
	t.Run("no policy", func(t *testing.T) { noApprovalWithoutPolicy(t, newTestEnvOn(t, plane)) })
	t.Run("one request", func(t *testing.T) { t.Parallel(); hubMayCrashAtAnyTime(t, newTestEnvOn(t, plane)) })
	for name, test := range map[string]func(*testing.T, *testEnv){
		"two requests": denialOfFirstRequestKeepsSecond, "two requests denied": denialOfAllRequestsRollsBack, "a lost answer": approvedRequestIsNotRolledBack,
		"too many requests": tooManyAreDenied, "many malformed requests": denialsCostLittle,
		"an earlier Cluster": retriesEnd, "a token expires": tokenThatExpiresMeanwhileIsInvalid,
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); test(t, newTestEnvOn(t, plane)) })
	}
}

func hubMayCrashAtAnyTime(t *testing.T, w *testEnv) {
	t.Helper()
	died := 0
	for writes := range manyWrites {
		name := fmt.Sprintf("dies-%d", writes)
		token, other := w.token(""), w.token("")
		w.createRequest(t, token, name+"-a")
		w.createRequest(t, other, name+"-b")
		first := w.run(name+"-a", writes, time.Now())
		if first != nil && !errors.Is(first, errKilled) {
			t.Fatalf("after %d writes: %v", writes, first)
		}
		// The next hub process answers one request in time, and the other one after its deadline.
		w.must(w.run(name+"-a", manyWrites, time.Now()))
		if got := w.answer(name + "-a"); got.Type != certificatesv1.CertificateApproved {
			t.Errorf("killed after %d writes: %+v", writes, got)
		}
		w.cluster(name + "-a")
		if err := w.run(name+"-b", writes, time.Now()); err == nil {
			break
		}
		died++
		w.must(w.run(name+"-b", manyWrites, time.Now().Add(time.Hour)))
		if got := w.answer(name + "-b"); got.Type != certificatesv1.CertificateDenied || got.Reason != bootstrap.ReasonTooLate {
			t.Errorf("killed after %d writes, then late: %+v", writes, got)
		}
		w.wantNone(name + "-b")
		if marks := w.annotationsOf(t.Context(), other); len(marks) > 0 {
			t.Errorf("killed after %d writes, then late: the token is marked %v", writes, marks)
		}
	}
	if died < 10 {
		t.Errorf("the hub crashed only %d times", died)
	}
}

func denialOfFirstRequestKeepsSecond(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.token("")
	w.createRequest(t, token, "again")
	w.granting("again", "again")
	second := certificateRequest(t, "again-2", pkix.Name{CommonName: bootstrap.AgentUser("again"), Organization: []string{bootstrap.AgentsGroup}})
	second.Annotations[kube.AnnotationClusterID] = "id-again"
	w.must(w.agent(w.tokenConfig(token)).Create(t.Context(), second))
	w.must(w.run("again-2", manyWrites, time.Now()))
	if got := w.answer("again-2"); got.Type != certificatesv1.CertificateApproved {
		t.Fatalf("the second: %+v", got)
	}
	w.must(w.run("again", manyWrites, time.Now().Add(time.Hour)))
	if got := w.answer("again"); got.Type != certificatesv1.CertificateDenied {
		t.Errorf("the first: %+v", got)
	}
	w.cluster("again")
	if marks := w.annotationsOf(t.Context(), token); marks[kube.AnnotationRegistered] != "again/id-again" {
		t.Errorf("the token is marked %v", marks)
	}
}

// createRequestObject creates the request of a token's holder to register cluster, with the name request and the given
// change.
func (w *testEnv) createRequestObject(t *testing.T, token bootstrap.Token, request, cluster string, change func(*certificatesv1.CertificateSigningRequest)) {
	t.Helper()
	csr := certificateRequest(t, request, pkix.Name{CommonName: bootstrap.AgentUser(cluster), Organization: []string{bootstrap.AgentsGroup}})
	csr.Annotations[kube.AnnotationClusterID] = "id-" + cluster
	change(csr)
	w.must(w.agent(w.tokenConfig(token)).Create(t.Context(), csr))
}

func asIs(*certificatesv1.CertificateSigningRequest) {}

// wantAnswer checks the answer to the request.
func (w *testEnv) wantAnswer(request string, kind certificatesv1.RequestConditionType, reason string) {
	w.Helper()
	if got := w.answer(request); got.Type != kind || got.Reason != reason {
		w.Errorf("%s was answered with %+v, want %s for %s", request, got, kind, reason)
	}
}

// granting runs the request until the agent's RBAC exists, and no further.
func (w *testEnv) granting(request, cluster string) {
	w.Helper()
	for writes := range manyWrites {
		if err := w.run(request, writes, time.Now()); err == nil {
			w.Fatal("it was approved")
		}
		if w.Get(w.Context(), client.ObjectKey{Name: karmada.AgentRoleName(cluster)}, &rbacv1.ClusterRoleBinding{}) == nil {
			return
		}
	}
}

func denialOfAllRequestsRollsBack(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.token("")
	for _, request := range []string{"both-1", "both-2"} {
		w.createRequestObject(t, token, request, "both", asIs)
	}
	w.granting("both-1", "both")
	for writes := 0; len(strings.Fields(w.cluster("both").Annotations["towline.dev/certificate-requests"])) < 2; writes++ {
		if err := w.run("both-2", writes, time.Now()); err == nil {
			t.Fatal("it was approved")
		}
	}
	late := time.Now().Add(time.Hour)
	w.must(w.run("both-1", manyWrites, late))
	w.cluster("both")
	w.must(w.run("both-2", manyWrites, late))
	w.wantAnswer("both-1", certificatesv1.CertificateDenied, bootstrap.ReasonTooLate)
	w.wantAnswer("both-2", certificatesv1.CertificateDenied, bootstrap.ReasonTooLate)
	w.wantNone("both")
	if marks := w.annotationsOf(t.Context(), token); len(marks) > 0 {
		t.Errorf("the token is marked %v", marks)
	}
}

// staleCache is a cache without any answer.
type staleCache struct{ client.Client }

func (b staleCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, o ...client.GetOption) error {
	err := b.Client.Get(ctx, key, obj, o...)
	if csr, ok := obj.(*certificatesv1.CertificateSigningRequest); ok {
		csr.Status = certificatesv1.CertificateSigningRequestStatus{}
	}
	return err
}

func approvedRequestIsNotRolledBack(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.token("")
	w.createRequestObject(t, token, "lost", "lost", asIs)
	w.must(w.run("lost", manyWrites, time.Now()))
	// The cache does not have the approval, and the deadline has passed.
	w.must((&testEnv{TB: t, Client: w.Client, config: w.config, cached: staleCache{w.Client}}).run("lost", manyWrites, time.Now().Add(time.Hour)))
	w.wantAnswer("lost", certificatesv1.CertificateApproved, bootstrap.ReasonApproved)
	w.cluster("lost")
	if marks := w.annotationsOf(t.Context(), token); marks[kube.AnnotationRegistered] != "lost/id-lost" {
		t.Errorf("the token is marked %v", marks)
	}
}

func retriesEnd(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.token("")
	w.createRequestObject(t, token, "stuck", "stuck", asIs)
	w.must(w.run("stuck", manyWrites, time.Now()))
	held := w.cluster("stuck")
	held.Finalizers = append(held.Finalizers, "example.com/stuck")
	w.must(w.Update(t.Context(), held))
	w.must(w.Delete(t.Context(), held))
	for request, change := range map[string]func(*certificatesv1.CertificateSigningRequest){
		"stuck-endless": func(csr *certificatesv1.CertificateSigningRequest) { delete(csr.Annotations, kube.AnnotationUntil) },
		"stuck-for-long": func(csr *certificatesv1.CertificateSigningRequest) {
			csr.Annotations[kube.AnnotationUntil] = "2999-01-01T00:00:00Z"
		},
	} {
		w.createRequestObject(t, token, request, "stuck", change)
		w.must(w.run(request, manyWrites, time.Now()))
		csr := &certificatesv1.CertificateSigningRequest{}
		w.must(w.Get(t.Context(), client.ObjectKey{Name: request}, csr))
		if len(csr.Status.Conditions) > 0 {
			t.Errorf("%s was answered with %+v while the earlier Cluster is being deleted", request, csr.Status.Conditions)
		}
		w.must(w.run(request, manyWrites, time.Now().Add(16*time.Minute)))
		w.wantAnswer(request, certificatesv1.CertificateDenied, bootstrap.ReasonTooLate)
	}
	held = w.cluster("stuck")
	held.Finalizers = nil
	w.must(w.Update(t.Context(), held))
}

func tokenThatExpiresMeanwhileIsInvalid(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.tokenWith(bootstrap.TokenOptions{TTL: 10 * time.Minute})
	w.createRequestObject(t, token, "expires", "expires", asIs)
	w.must(w.run("expires", manyWrites, time.Now().Add(11*time.Minute)))
	w.wantAnswer("expires", certificatesv1.CertificateDenied, bootstrap.ReasonInvalidToken)
	w.wantNone("expires")
}

func noApprovalWithoutPolicy(t *testing.T, w *testEnv) {
	t.Helper()
	token := w.token("")
	for _, kind := range []string{"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"} {
		guard := &unstructured.Unstructured{}
		guard.SetGroupVersionKind(schema.GroupVersionKind{Group: "admissionregistration.k8s.io", Version: "v1", Kind: kind})
		guard.SetName("towline-karmada-agents")
		w.must(w.Delete(t.Context(), guard))
		name := strings.ToLower("without-" + kind)
		w.createRequestObject(t, token, name, "unguarded", asIs)
		w.must(w.run(name, manyWrites, time.Now()))
		csr := &certificatesv1.CertificateSigningRequest{}
		w.must(w.Get(t.Context(), client.ObjectKey{Name: name}, csr))
		if len(csr.Status.Conditions) > 0 {
			t.Errorf("without %s: %+v", kind, csr.Status.Conditions)
		}
		// The hub has created it again. An immediate repetition, or another request, must not be approved either.
		w.must(w.Get(t.Context(), client.ObjectKeyFromObject(guard), guard))
		w.must(w.run(name, manyWrites, time.Now()))
		w.must(w.Get(t.Context(), client.ObjectKey{Name: name}, csr))
		if age := time.Since(guard.GetCreationTimestamp().Time); len(csr.Status.Conditions) > 0 && age < kube.PolicyDelay {
			t.Errorf("%s is %s old: %+v", kind, age, csr.Status.Conditions)
		}
		w.awaitPolicy()
		w.must(w.run(name, manyWrites, time.Now()))
		w.wantAnswer(name, certificatesv1.CertificateApproved, bootstrap.ReasonApproved)
	}
}

func tooManyAreDenied(t *testing.T, w *testEnv) {
	t.Helper()
	const most, more = 20, 3
	token := w.token("")
	for i := range most + more {
		w.createRequestObject(t, token, fmt.Sprintf("many-%d", i), "many", asIs)
	}
	denied := 0
	for i := range most + more {
		name := fmt.Sprintf("many-%d", i)
		w.must(w.run(name, manyWrites, time.Now()))
		switch got := w.answer(name); {
		case got.Reason == bootstrap.ReasonTooManyRequests:
			denied++
		case got.Type != certificatesv1.CertificateApproved:
			t.Errorf("%s: %+v", name, got)
		}
	}
	if denied != more {
		t.Errorf("%d of %d were denied as too many", denied, most+more)
	}
}

func denialsCostLittle(t *testing.T, w *testEnv) {
	t.Helper()
	const requests = 24
	token := w.token("")
	reader := w.agent(w.tokenConfig(token))
	bound := func() (count int) {
		bindings := &rbacv1.ClusterRoleBindingList{}
		w.must(w.List(t.Context(), bindings))
		for _, binding := range bindings.Items {
			if len(binding.Subjects) > 0 && binding.Subjects[0].Name == "system:bootstrap:"+token.ID {
				count++
			}
		}
		return count
	}
	for i := range requests {
		name := fmt.Sprintf("malformed-%d", i)
		w.createRequestObject(t, token, name, "rbac-generator", asIs)
		if got := bound(); i == 0 && got != 0 {
			t.Errorf("%d bindings for requests without an answer", got)
		}
		w.must(w.run(name, manyWrites, time.Now()))
		csr := &certificatesv1.CertificateSigningRequest{}
		w.eventually(func() string {
			if err := reader.Get(t.Context(), client.ObjectKey{Name: name}, csr); err != nil {
				return err.Error()
			}
			return ""
		})
		if len(csr.Status.Conditions) != 1 || csr.Status.Conditions[0].Reason != bootstrap.ReasonInvalidRequest {
			t.Errorf("the requester reads %+v", csr.Status.Conditions)
		}
	}
	if got := bound(); got != 20 {
		t.Errorf("%d bindings for %d requests, want 20", got, requests)
	}
}
