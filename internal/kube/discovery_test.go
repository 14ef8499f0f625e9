package kube_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/kube"
)

// servedAPIs is the discovery of a cluster, group by group. The first version of a group is the preferred one, unless
// preferred has another one for the group.
type servedAPIs struct {
	versions  []servedVersion
	preferred map[string]string
	// isLegacy is true for an API server without aggregated discovery.
	isLegacy bool
}

// servedVersion is an API version and its resources. isDown is true if its API server does not answer.
type servedVersion struct {
	schema.GroupVersion

	resources []metav1.APIResource
	isDown    bool
}

// groups returns the groups in their order.
func (s *servedAPIs) groups() []metav1.APIGroup {
	var groups []metav1.APIGroup
	index := map[string]int{}
	for _, version := range s.versions {
		i, ok := index[version.Group]
		if !ok {
			i = len(groups)
			index[version.Group] = i
			groups = append(groups, metav1.APIGroup{Name: version.Group})
		}
		group, entry := &groups[i], metav1.GroupVersionForDiscovery{GroupVersion: version.String(), Version: version.Version}
		group.Versions = append(group.Versions, entry)
		if version.Version == s.preferred[version.Group] || s.preferred[version.Group] == "" && !ok {
			group.PreferredVersion = entry
		}
	}
	return groups
}

// aggregated returns the aggregated discovery of the core group, or of all other groups.
func (s *servedAPIs) aggregated(isCore bool) apidiscoveryv2.APIGroupDiscoveryList {
	var list apidiscoveryv2.APIGroupDiscoveryList
	for _, group := range s.groups() {
		if (group.Name == "") != isCore {
			continue
		}
		item := apidiscoveryv2.APIGroupDiscovery{ObjectMeta: metav1.ObjectMeta{Name: group.Name}}
		for _, version := range s.versions {
			if version.Group != group.Name {
				continue
			}
			out := apidiscoveryv2.APIVersionDiscovery{Version: version.Version}
			if version.isDown {
				out.Freshness = apidiscoveryv2.DiscoveryFreshnessStale
			}
			for _, resource := range version.resources {
				kind := &metav1.GroupVersionKind{Group: version.Group, Version: version.Version, Kind: resource.Kind}
				scope := apidiscoveryv2.ScopeCluster
				if resource.Namespaced {
					scope = apidiscoveryv2.ScopeNamespace
				}
				if parent, sub, isSub := strings.Cut(resource.Name, "/"); isSub {
					out.Resources = append(out.Resources, apidiscoveryv2.APIResourceDiscovery{Resource: parent, Scope: scope,
						Subresources: []apidiscoveryv2.APISubresourceDiscovery{{Subresource: sub, ResponseKind: kind}}})
					continue
				}
				out.Resources = append(out.Resources, apidiscoveryv2.APIResourceDiscovery{
					Resource: resource.Name, ResponseKind: kind, Scope: scope, SingularResource: resource.SingularName, Verbs: resource.Verbs,
				})
			}
			item.Versions = append(item.Versions, out)
		}
		list.Items = append(list.Items, item)
	}
	return list
}

// responses returns the bodies of the responses by path.
func (s *servedAPIs) responses() map[string]any {
	if !s.isLegacy {
		return map[string]any{"/api": s.aggregated(true), "/apis": s.aggregated(false)}
	}
	core, others := metav1.APIVersions{}, metav1.APIGroupList{}
	responses := map[string]any{}
	for _, group := range s.groups() {
		if group.Name != "" {
			others.Groups = append(others.Groups, group)
			continue
		}
		for _, version := range group.Versions {
			core.Versions = append(core.Versions, version.Version)
		}
	}
	for _, version := range s.versions {
		path := "/apis/" + version.String()
		if version.Group == "" {
			path = "/api/" + version.Version
		}
		if !version.isDown {
			responses[path] = metav1.APIResourceList{GroupVersion: version.String(), APIResources: version.resources}
		}
	}
	responses["/api"], responses["/apis"] = core, others
	return responses
}

// serve serves the discovery of a cluster.
func (s *servedAPIs) serve(t testing.TB) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(s.handler(t))
	t.Cleanup(server.Close)
	return server
}

// handler returns the handler of serve. A version that is down answers 503.
func (s *servedAPIs) handler(t testing.TB) http.HandlerFunc {
	t.Helper()
	bodies := map[string][]byte{}
	for path, response := range s.responses() {
		raw, err := json.Marshal(response)
		if err != nil {
			t.Fatal(err)
		}
		bodies[path] = raw
	}
	contentType := "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	if s.isLegacy {
		contentType = "application/json"
	}
	return func(w http.ResponseWriter, r *http.Request) {
		body, ok := bodies[r.URL.Path]
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(body) // the client may have closed the connection
	}
}

// newDiscovery returns a discovery client that requests as fast as it can.
func newDiscovery(t testing.TB, url string) *kube.Discovery {
	t.Helper()
	client, err := kube.NewDiscovery(&rest.Config{Host: url, QPS: -1}, http.DefaultClient)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// ordinaryAPIs are as many APIs as a cluster with a few CustomResourceDefinitions has.
func ordinaryAPIs() *servedAPIs { return manyAPIs(20, 4) }

// manyAPIs are groups of one version with kinds of a usual length, each with a subresource.
func manyAPIs(groups, kinds int) *servedAPIs {
	served := &servedAPIs{}
	for g := range groups {
		version := servedVersion{GroupVersion: schema.GroupVersion{Group: fmt.Sprintf("group%d.k8s.io", g), Version: "v1"}}
		for k := range kinds {
			name := fmt.Sprintf("samples%d", k)
			version.resources = append(version.resources,
				metav1.APIResource{Name: name, Namespaced: true, Kind: fmt.Sprintf("Sample%d", k), Verbs: []string{"create", "delete", "get", "list", "patch", "update", "watch"}},
				metav1.APIResource{Name: name + "/status", Namespaced: true, Kind: fmt.Sprintf("Sample%d", k), Verbs: []string{"get", "patch", "update"}})
		}
		served.versions = append(served.versions, version)
	}
	return served
}

// hostileCluster serves groups of one API version, one by one. resources is the response for each version. It counts
// the requests.
func hostileCluster(t *testing.T, groups int, resources string) (url string, requests *atomic.Int64) {
	t.Helper()
	requests = &atomic.Int64{}
	served := manyAPIs(groups, 0)
	served.isLegacy = true
	list, err := json.Marshal(served.responses()["/apis"])
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		w.Header().Set("Content-Type", "application/json")
		body := resources
		switch r.URL.Path {
		case "/api":
			body = `{"kind":"APIVersions","versions":["v1"]}`
		case "/apis":
			body = string(list)
		}
		_, _ = fmt.Fprint(w, body) // the client may have closed the connection
	}))
	t.Cleanup(server.Close)
	return server.URL, requests
}

// TestHostileDiscovery has a cluster that serves each API version in a response of its own. Only the limit of all
// responses together ends that.
func TestHostileDiscovery(t *testing.T) {
	t.Parallel()
	long := `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"v1","resources":[{"name":"` + strings.Repeat("x", 200<<10) + `"}]}`
	for name, test := range map[string]struct {
		groups      int
		resources   string
		want        string
		maxRequests int64
	}{
		"much text": {500, long, "the cluster returned more than 16 MiB or 800000 values", 2000},
		"many groups": {
			1001, `{"kind":"APIResourceList","apiVersion":"v1","resources":[]}`, "the cluster serves more than 1000 API versions without aggregated discovery", 2,
		},
	} {
		url, requests := hostileCluster(t, test.groups, test.resources)
		client := newDiscovery(t, url)
		_, err := kube.NewMapper(client).Resource(schema.GroupVersionKind{Version: "v1", Kind: "Pod"})
		if !strings.HasSuffix(errorText(err), test.want) {
			t.Errorf("%s: got error %v of the mapper, want %q", name, err, test.want)
		}
		if n := requests.Load(); n > test.maxRequests {
			t.Errorf("%s: got %d requests, want %d at most", name, n, test.maxRequests)
		}
		if _, err := client.ServerPreferredResources(); errorText(err) != test.want {
			t.Errorf("%s: got error %v, want %q", name, err, test.want)
		}
	}
	url, _ := hostileCluster(t, 1, strings.Repeat("{", 1_000_000))
	if _, err := kube.NewMapper(newDiscovery(t, url)).IsNoLongerServed(schema.GroupVersionKind{Version: "v1", Kind: "Pod"}); !strings.Contains(errorText(err), "800000 values") {
		t.Errorf("got error %v for one response", err)
	}
}

// TestDiscoveryLimitsAPIs has as many APIs, and as much text in their names, as there may be, and one more.
func TestDiscoveryLimitsAPIs(t *testing.T) {
	t.Parallel()
	// A kind of this group has 256 bytes of text.
	text := func(kinds int) *servedAPIs {
		served := &servedAPIs{versions: []servedVersion{{GroupVersion: schema.GroupVersion{Group: strings.Repeat("g", 188), Version: "v1"}}}}
		for i := range kinds {
			name := fmt.Sprintf("k%031d", i)
			served.versions[0].resources = append(served.versions[0].resources, resource(name, strings.ToUpper(name), true))
		}
		return served
	}
	const tooMany = "the cluster serves more than 20000 API versions and resources, or their names have more than 1 MiB"
	for name, test := range map[string]struct {
		served *servedAPIs
		want   string
	}{
		"as many APIs as may be": {manyAPIs(400, 49), ""},
		"too many APIs":          {manyAPIs(401, 49), tooMany},
		"as much text as may be": {text(1<<20/256 - 1), ""},
		"too much text":          {text(1 << 20 / 256), tooMany},
	} {
		_, lists, err := newDiscovery(t, test.served.serve(t).URL).ServerGroupsAndResources()
		if errorText(err) != test.want || (err == nil) != (len(lists) > 0) {
			t.Errorf("%s: got %d versions and error %v, want error %q", name, len(lists), err, test.want)
		}
	}
}

// TestDiscoveryOmitsImpossibleNames: a cluster can return names that Kubernetes does not allow.
func TestDiscoveryOmitsImpossibleNames(t *testing.T) {
	t.Parallel()
	long := func(length int) string { return strings.Repeat("x", length) }
	at := func(group, version string, resources ...metav1.APIResource) servedVersion {
		return servedVersion{GroupVersion: schema.GroupVersion{Group: group, Version: version}, resources: resources}
	}
	ok := resource("ok", "OK", true)
	served := &servedAPIs{versions: []servedVersion{
		at("", "v1", ok, resource("ok/status", "OK", true), resource(long(253), long(63), true), resource("kind", long(64), true), resource(long(254), "Name", true),
			resource("quote", `"`, true), resource("line\nbreak", "A", true), resource("", "B", true), resource("umlaut", "Ä", true), resource("external:metric_a.b", "C-1", true)),
		at(long(253), long(63), ok), at(long(254), "v1", ok), at("a", long(64), ok), at("a b", "v1", ok), at("a", "v1/v1", ok), at("a", "v2"),
	}}
	for _, isLegacy := range []bool{false, true} {
		served.isLegacy = isLegacy
		_, lists, err := newDiscovery(t, served.serve(t).URL).ServerGroupsAndResources()
		if failed := (*discovery.ErrGroupDiscoveryFailed)(nil); err != nil && !errors.As(err, &failed) { // a path with a slash fails
			t.Fatal(err)
		}
		got := map[string][]string{}
		for _, list := range lists {
			got[list.GroupVersion] = nil
			for _, found := range list.APIResources {
				got[list.GroupVersion] = append(got[list.GroupVersion], found.Name+" "+found.Kind)
			}
		}
		want := map[string][]string{"v1": {"ok OK", long(253) + " " + long(63), "external:metric_a.b C-1"}, long(253) + "/" + long(63): {"ok OK"}, "a/v2": nil}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("legacy %t: got -, want +\n%s", isLegacy, diff)
		}
	}
}

// TestDiscoveryHasFewConnections reads many API versions one by one.
func TestDiscoveryHasFewConnections(t *testing.T) {
	t.Parallel()
	served := manyAPIs(300, 1)
	served.isLegacy = true
	handler := served.handler(t)
	var running, most atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer running.Add(-1)
		if n := running.Add(1); n > most.Load() {
			most.Store(n)
		}
		<-time.After(time.Millisecond)
		handler(w, r)
	}))
	t.Cleanup(server.Close)
	if _, lists, err := newDiscovery(t, server.URL).ServerGroupsAndResources(); err != nil || len(lists) != 300 {
		t.Errorf("got %d API versions, error %v", len(lists), err)
	}
	if n := most.Load(); n > 25 {
		t.Errorf("%d requests were sent at once", n)
	}
}
