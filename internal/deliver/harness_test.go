package deliver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// memberEngine is an Engine with the member in memory. Its objects and records stay after a restart of the agent.
type memberEngine struct {
	mu      sync.Mutex
	records map[bundle.ID]bundle.Bundle
	// objects maps the names of objects to their applied JSON; writes counts the changes.
	objects map[string]string
	writes  int
	// refuse maps the names of objects that fail to the reason.
	refuse map[string]string
}

func newMemberEngine() *memberEngine {
	return &memberEngine{records: map[bundle.ID]bundle.Bundle{}, objects: map[string]string{}, refuse: map[string]string{}}
}

func (e *memberEngine) Converge(_ context.Context, b bundle.Bundle) (bundle.Report, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	digest, err := b.Digest()
	if err != nil {
		return bundle.Report{}, err
	}
	old := e.records[b.ID]
	e.records[b.ID] = b
	report := bundle.Report{ID: b.ID, Digest: digest, State: bundle.StateApplied, Kinds: []string{"ConfigMap.v1."}, LastApplied: time.Now()}
	for _, item := range b.Items {
		for _, obj := range item.Objects {
			if reason := e.refuse[obj.GetName()]; reason != "" {
				report.State, report.Message = bundle.StateFailed, kube.RefOf(obj).String()+": "+reason
				continue
			}
			raw, err := obj.MarshalJSON()
			if err != nil {
				return report, err
			}
			if e.objects[obj.GetName()] != string(raw) {
				e.objects[obj.GetName()] = string(raw)
				e.writes++
			}
		}
	}
	for _, ref := range old.Refs() {
		if !slices.Contains(b.Refs(), ref) {
			delete(e.objects, ref.Name)
			e.writes++
		}
	}
	return report, nil
}

func (e *memberEngine) Withdraw(_ context.Context, w bundle.Withdrawal) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !w.Orphan {
		for _, ref := range e.records[w.ID].Refs() {
			delete(e.objects, ref.Name)
			e.writes++
		}
	}
	delete(e.records, w.ID)
	return true, nil
}

func (e *memberEngine) FindDeployed(_ context.Context, id bundle.ID) (bundle.Deployed, bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, ok := e.records[id]
	digest, err := b.Digest()
	return bundle.Deployed{
		ID: id, Owner: b.Owner, Hub: b.Hub, CorrectDrift: b.Options.CorrectDrift, Report: bundle.Report{ID: id, Digest: digest, State: bundle.StateApplied},
	}, ok, err
}

func (e *memberEngine) ListDeployed(ctx context.Context) ([]bundle.Deployed, error) {
	e.mu.Lock()
	ids := slices.Collect(maps.Keys(e.records))
	e.mu.Unlock()
	var all []bundle.Deployed
	for _, id := range ids {
		d, _, err := e.FindDeployed(ctx, id)
		if err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// record returns the last applied bundle of id.
func (e *memberEngine) record(id bundle.ID) (b bundle.Bundle, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, ok = e.records[id]
	return b, ok
}

func (e *memberEngine) refuseObject(name, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse[name] = reason
}

func (e *memberEngine) listNames() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var names []string
	for name := range e.objects {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (e *memberEngine) writeCount() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.writes
}

// requests is a transport that logs the requests of a client, and lets a test make requests fail.
type requests struct {
	mu   sync.Mutex
	log  []string
	fail func(request *http.Request) bool
	// succeeded has the requests of log with a successful response.
	succeeded []string
}

var errCrash = errors.New("crash")

func (r *requests) wrap(config *rest.Config) *rest.Config {
	wrapped := rest.CopyConfig(config)
	wrapped.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(request *http.Request) (*http.Response, error) {
			r.mu.Lock()
			fail := r.fail != nil && r.fail(request)
			line := request.Method + " " + request.URL.Path + "?" + request.URL.RawQuery
			r.log = append(r.log, line)
			r.mu.Unlock()
			if fail {
				return nil, errCrash
			}
			response, err := next.RoundTrip(request)
			if err == nil && response.StatusCode < http.StatusBadRequest {
				r.mu.Lock()
				r.succeeded = append(r.succeeded, line)
				r.mu.Unlock()
			}
			return response, err
		})
	})
	return wrapped
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// take returns the requests since the last take that contain all of the given words.
func (r *requests) take(words ...string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var taken []string
	for _, line := range r.log {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			taken = append(taken, line)
		}
	}
	r.log = nil
	return taken
}

// takeSucceeded returns the requests that have succeeded since the last takeSucceeded.
func (r *requests) takeSucceeded() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	taken := r.succeeded
	r.succeeded = nil
	return taken
}

func (r *requests) failIf(fail func(*http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = fail
}

func writes(log []string) []string {
	return slices.DeleteFunc(slices.Clone(log), func(line string) bool { return strings.HasPrefix(line, http.MethodGet) })
}

// hub is a real API server with our kinds, and a PullTransport on it.
type hub struct {
	t        *testing.T
	plane    *localkube.Plane
	admin    client.Client
	pull     *PullTransport
	shard    fleet.Shard // of pull
	requests *requests
}

func sharedHub(t *testing.T) *hub { t.Helper(); return newHub(t, localkube.Shared(t)) }

// hubOfShard returns the shared hub with the transport of a shard. A collector on the shared hub must only delete the
// content of its own shard, because it does not know the running deliveries of other tests.
func hubOfShard(t *testing.T, shard fleet.Shard) *hub {
	t.Helper()
	h := sharedHub(t)
	h.shard = shard
	h.restart()
	return h
}

func newHub(t *testing.T, plane *localkube.Plane) *hub {
	t.Helper()
	h := &hub{t: t, plane: plane, admin: clientFor(t, plane.Config), requests: &requests{}}
	h.installCRDs()
	h.restart()
	return h
}

// restart replaces the PullTransport by a new PullTransport, like a restart of the hub.
func (h *hub) restart() {
	h.t.Helper()
	hubClient := clientFor(h.t, h.requests.wrap(h.plane.Config))
	pull, err := NewShardPullTransport(hubClient, hubClient, testKey, h.shard)
	if err != nil {
		h.t.Fatal(err)
	}
	h.pull = pull
}

func clientFor(t *testing.T, config *rest.Config) client.WithWatch {
	t.Helper()
	c, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// installCRDs creates the namespace of shared content and the CustomResourceDefinitions, and waits until they are
// served. Tests may call it concurrently.
func (h *hub) installCRDs() {
	h.t.Helper()
	h.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}})
	for _, plural := range []string{"configurationgroups", "configurationbundles"} {
		raw, err := crds.FS.ReadFile("lib.projectsveltos.io_" + plural + ".yaml")
		if err != nil {
			h.t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(raw, crd); err != nil {
			h.t.Fatal(err)
		}
		h.create(crd)
	}
	for _, list := range []client.ObjectList{&libv1beta1.ConfigurationGroupList{}, &libv1beta1.ConfigurationBundleList{}} {
		eventually(h.t, "kinds are served", func(ctx context.Context) error { return h.admin.List(ctx, list) })
	}
}

func (h *hub) create(obj client.Object) {
	h.t.Helper()
	if err := h.admin.Create(h.t.Context(), obj); err != nil && !apierrors.IsAlreadyExists(err) {
		h.t.Fatal(err)
	}
}

// createMember registers a pull-mode member with its own delivery namespace.
func (h *hub) createMember(name string) fleet.Member {
	h.t.Helper()
	namespace := h.plane.Namespace(h.t, name)
	h.claim(namespace, name)
	for _, role := range []*rbacv1.Role{
		{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: namespace}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
			{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationgroups/status"}, Verbs: []string{"patch"}},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{fleet.ContentKeySecret(name)}, Verbs: []string{"get"}},
		}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: namespace}, Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{libv1beta1.GroupName}, Resources: []string{"configurationbundles"}, Verbs: []string{"get"}},
		}},
	} {
		h.create(role)
		h.create(&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: role.Namespace, Name: namespace},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: namespace},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: namespace}},
		})
	}
	return fleet.Member{Type: fleet.TypeSveltos, Namespace: namespace, Name: name, Mode: fleet.Pull, DeliveryNamespace: namespace}
}

// claim writes the claim on a delivery namespace, like a registration.
func (h *hub) claim(namespace, holder string) {
	h.t.Helper()
	obj := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	patch := fmt.Sprintf(`{"metadata":{"annotations":{%q:%q}}}`, kube.AnnotationDeliveryHolder, holder)
	if err := h.admin.Patch(h.t.Context(), obj, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
		h.t.Fatal(err)
	}
}

// startAgent runs the agent of m, with an agent's permissions, until stop is called or the test ends.
func (h *hub) startAgent(m fleet.Member, engine *memberEngine) (log *requests, stop func()) {
	h.t.Helper()
	return h.startAgentOn(h.plane.Config, m, engine)
}

// startAgentOn is startAgent with another config of the hub.
func (h *hub) startAgentOn(config *rest.Config, m fleet.Member, engine *memberEngine) (log *requests, stop func()) {
	h.t.Helper()
	log = &requests{}
	config = log.wrap(LimitResponses(config))
	config.Impersonate.UserName = m.DeliveryNamespace
	agentSource := NewAgentSource(clientFor(h.t, config), m.DeliveryNamespace, m.Name)
	ctx, cancel := context.WithCancel(h.t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- agentSource.Run(ctx, 2, func(ctx context.Context, d Delivery) error { return handleDelivery(ctx, agentSource, engine, d) })
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			h.t.Error(err)
		}
	})
	h.t.Cleanup(stop)
	return log, stop
}

// handleDelivery handles a delivery like an agent.
func handleDelivery(ctx context.Context, agentSource *AgentSource, engine *memberEngine, d Delivery) error {
	if d.Remove {
		if _, err := engine.Withdraw(ctx, d.Withdrawal()); err != nil {
			return err
		}
		return agentSource.Report(ctx, d, bundle.Report{ID: d.ID, State: bundle.StateRemoved})
	}
	b, ok := engine.record(d.ID)
	digest, err := b.Digest()
	if err != nil {
		return err
	}
	if !ok || digest != d.Digest {
		b, err = agentSource.Fetch(ctx, d)
		if errors.Is(err, ErrContentMissing) {
			return agentSource.Report(ctx, d, d.MissingReport(err.Error()))
		}
		if err != nil {
			return errors.Join(err, agentSource.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateFailed, Message: err.Error()}))
		}
	}
	if err := agentSource.Report(ctx, d, bundle.Report{ID: d.ID, Digest: d.Digest, State: bundle.StateApplying}); err != nil {
		return err
	}
	report, err := engine.Converge(ctx, b)
	if err != nil {
		return err
	}
	if err := agentSource.Report(ctx, d, report); err != nil {
		return err
	}
	if report.State == bundle.StateFailed {
		return errors.New(report.Message)
	}
	return nil
}

// listBundles lists the names of the ConfigurationBundles in namespace whose content contains marker.
func (h *hub) listBundles(namespace, marker string) []string {
	h.t.Helper()
	list := &libv1beta1.ConfigurationBundleList{}
	if err := h.admin.List(h.t.Context(), list, client.InNamespace(namespace)); err != nil {
		h.t.Fatal(err)
	}
	var names []string
	for _, obj := range list.Items {
		stream, err := decompress(obj.Spec.Payload)
		if err != nil {
			h.t.Fatal(err)
		}
		if bytes.Contains(stream, []byte(marker)) {
			names = append(names, obj.Name)
		}
	}
	return names
}

func (h *hub) deleteBundles(namespace string) {
	h.t.Helper()
	if err := h.admin.DeleteAllOf(h.t.Context(), &libv1beta1.ConfigurationBundle{}, client.InNamespace(namespace)); err != nil {
		h.t.Fatal(err)
	}
}

func (h *hub) getGroup(m fleet.Member, id bundle.ID) *libv1beta1.ConfigurationGroup {
	h.t.Helper()
	group := &libv1beta1.ConfigurationGroup{}
	if err := h.admin.Get(h.t.Context(), client.ObjectKey{Namespace: m.DeliveryNamespace, Name: GroupName(m, id)}, group); err != nil {
		h.t.Fatal(err)
	}
	return group
}

// eventually calls check until it returns nil, and fails the test after 4 minutes.
func eventually(t *testing.T, what string, check func(context.Context) error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 4*time.Minute, true, func(ctx context.Context) (bool, error) {
		last = check(ctx)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v; last: %v", what, err, last)
	}
}

// deliverUntil calls Deliver until the report is about b and has state.
func deliverUntil(t *testing.T, transport Transport, m fleet.Member, b bundle.Bundle, state bundle.State) bundle.Report {
	t.Helper()
	want, err := b.Digest()
	if err != nil {
		t.Fatal(err)
	}
	var report bundle.Report
	eventually(t, "deliver until "+string(state), func(ctx context.Context) error {
		if report, err = transport.Deliver(ctx, m, b); err != nil {
			return err
		}
		if report.Digest != want || report.State != state {
			return fmt.Errorf("report is %+v", report)
		}
		return nil
	})
	return report
}

func withdrawUntilDone(t *testing.T, transport Transport, m fleet.Member, w bundle.Withdrawal) {
	t.Helper()
	eventually(t, "withdraw", func(ctx context.Context) error {
		done, err := transport.Withdraw(ctx, m, w)
		if err == nil && !done {
			err = errors.New("not done")
		}
		return err
	})
}
