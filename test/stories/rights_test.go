package stories

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// Each story runs its hub with the ServiceAccount of config/hub.yaml, without the binding to cluster-admin. The log of
// the hub has each of its requests. A request that config/hub.yaml does not allow fails the story. After all stories,
// an unused right fails the run, unless unusedRights has the reason.

// unusedRights are the rights that no story uses, with the reason for which the hub needs them.
func unusedRights() map[string]string {
	const (
		granted   = "the hub grants it to agents or bootstrap tokens, so RBAC requires it of the hub"
		checked   = "the API server checks it in a request for another resource"
		corrects  = "the hub corrects objects of a registration that others have changed"
		fallback  = "informers list if the API server does not stream lists"
		asOthers  = "the same code as for ClusterProfiles"
		leader    = "leader election"
		successor = "a Cluster takes over the ID of a Cluster that was deleted without a hub"
	)
	reasons := map[string]string{
		"create certificatesigningrequests.certificates.k8s.io":                   granted,
		"create certificatesigningrequests/clusteragent.certificates.k8s.io":      granted,
		"create certificatesigningrequests/selfclusteragent.certificates.k8s.io":  granted,
		"get clusters/status.cluster.karmada.io":                                  granted,
		"get configurationgroups/status.lib.projectsveltos.io":                    granted,
		"get works/status.work.karmada.io":                                        granted,
		"approve signers.certificates.k8s.io kubernetes.io/kube-apiserver-client": checked,
		"impersonate serviceaccounts":                                             checked,
		"list rolerequests.lib.projectsveltos.io":                                 fallback,
		"create tokenreviews.authentication.k8s.io":                               "a client reads the metrics",
		"update leases.coordination.k8s.io":                                       leader,
		"patch leases.coordination.k8s.io":                                        "the Lease of an agent has the answer to an earlier order, from a backup",
		"update configmaps":                                                       successor,
		"get profiles.config.projectsveltos.io":                                   asOthers,
		"patch profiles.config.projectsveltos.io":                                 asOthers,
		"patch profiles/status.config.projectsveltos.io":                          asOthers,
	}
	for _, resource := range []string{"serviceaccounts", "clusterroles", "clusterrolebindings", "roles", "rolebindings"} {
		if resource != "serviceaccounts" {
			resource += ".rbac.authorization.k8s.io"
		}
		reasons["patch "+resource] = corrects
	}
	for _, resource := range []string{"validatingadmissionpolicies", "validatingadmissionpolicybindings"} {
		for _, policy := range []string{"towline-token-life", "towline-karmada-agents", "towline-cluster-summaries"} {
			reasons["update "+resource+".admissionregistration.k8s.io "+policy] = "a new version of Towline, or another user, changes the policy"
		}
	}
	for _, resource := range []string{"gitrepositories", "ocirepositories", "buckets"} {
		reasons["list "+resource+".source.toolkit.fluxcd.io"] = fallback
	}
	return reasons
}

// hubAccountName is the name of the hub's ServiceAccount, and of all its Roles, ClusterRoles and bindings.
const hubAccountName = "towline-hub"

// hubManifest returns the objects of config/hub.yaml that give the hub its rights.
func hubManifest() ([]*unstructured.Unstructured, error) {
	raw, err := os.ReadFile("../../config/hub.yaml")
	if err != nil {
		return nil, err
	}
	objects, err := kube.DecodeManifest(raw)
	kinds := []string{"Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
	return slices.DeleteFunc(objects, func(o *unstructured.Unstructured) bool {
		return !slices.Contains(kinds, o.GetKind()) || o.GetName() == "towline-hub-self"
	}), err
}

// useHubAccount gives the hub the ServiceAccount of config/hub.yaml.
func (w *world) useHubAccount() {
	w.t.Helper()
	objects, err := hubManifest()
	if err != nil {
		w.t.Fatal(err)
	}
	w.applyObjects(w.hub, objects)
	account, token := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: kube.AgentNamespace, Name: hubAccountName}}, &authenticationv1.TokenRequest{}
	if err := w.client(w.hub).SubResource("token").Create(w.t.Context(), account, token); err != nil {
		w.t.Fatal(err)
	}
	config, err := clientcmd.LoadFromFile(w.hub.Kubeconfig)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData, user.ClientCertificate, user.ClientKey, user.Token = nil, nil, "", "", token.Status.Token
	}
	raw, err := clientcmd.Write(*config)
	if err != nil {
		w.t.Fatal(err)
	}
	w.hubKubeconfig = w.save("hub-account.kubeconfig", string(raw))
}

// hubRequest is a kind of request of the hub, as RBAC sees it.
type hubRequest struct {
	verb, group, resource, namespace, name string
}

func (r hubRequest) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", r.verb, strings.TrimSuffix(r.resource+"."+r.group, "."), strings.Trim(r.namespace+"/"+r.name, "/")))
}

// hubRequests are the requests of the hubs of all stories.
type hubRequests struct {
	mu  sync.Mutex // guards all
	all map[hubRequest]bool
}

var usedRights = &hubRequests{all: map[hubRequest]bool{}}

// requestLog reads the log of a hub. It collects the requests, and writes the other lines to rest.
type requestLog struct {
	rest io.Writer
	host string
	used *hubRequests
	// isMember is true for a hub with further rights, whose requests are ignored.
	isMember bool

	line bytes.Buffer
	// refused are the requests that the API server has forbidden.
	mu      sync.Mutex
	refused map[hubRequest]bool
}

var (
	loggedRequest = regexp.MustCompile(`msg=Response .*\bverb=([A-Z]+) url="?([^" ]+)"? status="(\d+)`)
	debugLine     = []byte(" level=DEBUG")
)

// hubRequests returns a writer for the log of a hub.
func (w *world) hubRequests(out io.Writer) io.Writer {
	l := &requestLog{rest: out, host: w.hub.Config.Host, used: usedRights, isMember: w.granted, refused: map[hubRequest]bool{}}
	w.t.Cleanup(func() {
		if !w.granted {
			l.check(w.t)
		}
	})
	return l
}

// check fails the story if the API server has refused a request for which config/hub.yaml has no right. The API server
// also refuses other requests, for example to create objects in a namespace that is being deleted.
func (l *requestLog) check(t testing.TB) {
	rights, err := hubRights()
	if err != nil {
		t.Error(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for request := range l.refused {
		if !slices.ContainsFunc(rights, func(right hubRight) bool { return right.allows(request) }) {
			t.Errorf("config/hub.yaml does not allow the hub to %s", request)
		}
	}
}

// Write implements io.Writer. Only the goroutine that reads the output of the hub calls it.
func (l *requestLog) Write(text []byte) (int, error) {
	for line := range bytes.Lines(text) {
		l.line.Write(line)
		if !bytes.HasSuffix(line, []byte("\n")) {
			continue
		}
		whole := l.line.Bytes()
		if !bytes.Contains(whole, debugLine) {
			if _, err := l.rest.Write(whole); err != nil {
				return 0, err
			}
		} else if found := loggedRequest.FindSubmatch(whole); found != nil {
			l.add(string(found[1]), string(found[2]), string(found[3]))
		}
		l.line.Reset()
	}
	return len(text), nil
}

func (l *requestLog) add(method, address, status string) {
	parsed, err := url.Parse(address)
	if err != nil || "https://"+parsed.Host != l.host {
		return // a member
	}
	for _, request := range parseHubRequest(method, parsed, status) {
		if !l.isMember {
			l.used.mu.Lock()
			l.used.all[request] = true
			l.used.mu.Unlock()
		}
		if status == "403" {
			l.mu.Lock()
			l.refused[request] = true
			l.mu.Unlock()
		}
	}
}

// parseHubRequest returns the requests that RBAC authorizes. It returns none for discovery. A server-side apply that
// creates an object needs the verb create, too.
func parseHubRequest(method string, address *url.URL, status string) []hubRequest {
	parts := strings.Split(strings.Trim(address.Path, "/"), "/")
	var r hubRequest
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		r.group, parts = parts[1], parts[3:]
	default:
		return nil
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		r.namespace, parts = parts[1], parts[2:]
	}
	r.resource = parts[0]
	if len(parts) > 1 {
		r.name = parts[1]
	}
	if len(parts) > 2 {
		r.resource += "/" + parts[2]
	}
	watch := address.Query().Get("watch")
	switch {
	case method == http.MethodGet && (watch == "true" || watch == "1"):
		r.verb = "watch"
	case method == http.MethodGet && r.name == "":
		r.verb = "list"
	case method == http.MethodDelete && r.name == "":
		r.verb = "deletecollection"
	default:
		r.verb = map[string]string{http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}[method]
	}
	if method == http.MethodPatch && status == "201" {
		created := r
		created.verb = "create"
		return []hubRequest{r, created}
	}
	return []hubRequest{r}
}

// hubRight is one verb of one resource in a rule of config/hub.yaml.
type hubRight struct {
	hubRequest
	// role has the name of the role for messages.
	role string
}

// hubRights returns the rights in config/hub.yaml.
func hubRights() ([]hubRight, error) {
	objects, err := hubManifest()
	if err != nil {
		return nil, err
	}
	var rights []hubRight
	for _, object := range objects {
		if object.GetName() != hubAccountName || (object.GetKind() != "ClusterRole" && object.GetKind() != "Role") {
			continue
		}
		role := &rbacv1.ClusterRole{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, role); err != nil {
			return nil, err
		}
		for _, rule := range role.Rules {
			for _, group := range rule.APIGroups {
				for _, resource := range rule.Resources {
					for _, verb := range rule.Verbs {
						names := rule.ResourceNames
						if len(names) == 0 {
							names = []string{""}
						}
						for _, name := range names {
							rights = append(rights, hubRight{role: object.GetKind() + " " + strings.Trim(object.GetNamespace()+"/"+object.GetName(), "/"),
								hubRequest: hubRequest{verb: verb, group: group, resource: resource, namespace: object.GetNamespace(), name: name}})
						}
					}
				}
			}
		}
	}
	return rights, nil
}

// allows returns whether the right is sufficient for a request.
func (r hubRight) allows(request hubRequest) bool {
	is := func(right, requested string) bool { return right == requested || right == "*" }
	return is(r.verb, request.verb) && is(r.group, request.group) && is(r.resource, request.resource) &&
		(r.namespace == "" || r.namespace == request.namespace) && (r.name == "" || r.name == request.name)
}

// unused returns the rights in config/hub.yaml that no story has used.
func (u *hubRequests) unused() ([]string, error) {
	rights, err := hubRights()
	if err != nil {
		return nil, err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	var unused []string
	reasons := unusedRights()
	for _, right := range rights {
		isUsed := false
		for request := range u.all {
			isUsed = isUsed || right.allows(request)
		}
		if !isUsed && reasons[right.String()] == "" {
			unused = append(unused, right.role+": no story uses the right to "+right.String())
		}
		delete(reasons, right.String())
	}
	for right := range reasons {
		unused = append(unused, "config/hub.yaml does not have the right in unusedRights to "+right)
	}
	return unused, nil
}

// grantContent gives the hub rights for content with deploymentType Local, and for objects that templates refer to:
// they depend on the content, so an administrator grants them.
func (w *world) grantContent(rules ...rbacv1.PolicyRule) {
	w.t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "content-of-the-hub"}, Rules: rules}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: kube.AgentNamespace, Name: hubAccountName}},
	}
	for _, object := range []client.Object{role, binding} {
		if err := w.client(w.hub).Create(w.t.Context(), object); err != nil {
			w.t.Fatal(err)
		}
	}
	w.granted = true
}

// registerSelf starts the hub again as a member of its own fleet, for which config/hub.yaml binds it to cluster-admin.
func (w *world) registerSelf() {
	w.t.Helper()
	w.hubProcess.kill()
	w.grantContent(rbacv1.PolicyRule{APIGroups: []string{"*"}, Resources: []string{"*"}, Verbs: []string{"*"}},
		rbacv1.PolicyRule{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}})
	w.startHub("--register-self")
	w.awaitReady("mgmt", "mgmt")
}
