package clusterstatus_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
)

// hostileAPIs serves groups of one version without aggregated discovery, with resources as the response for each
// version. It is healthy and has no nodes.
func hostileAPIs(t *testing.T, groups int, resources string) *rest.Config {
	t.Helper()
	list := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{Kind: "APIGroupList", APIVersion: "v1"}}
	for i := range groups {
		name := fmt.Sprint("g", i)
		list.Groups = append(list.Groups, metav1.APIGroup{Name: name, Versions: []metav1.GroupVersionForDiscovery{{GroupVersion: name + "/v1", Version: "v1"}}})
	}
	apis, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := resources
		switch r.URL.Path {
		case "/readyz":
			body = "ok"
		case "/version":
			body = `{"gitVersion":"v1.34.0"}`
		case "/api":
			body = `{"kind":"APIVersions","versions":[]}`
		case "/apis":
			body = string(apis)
		case "/api/v1/nodes", "/api/v1/pods":
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprint(w, body) // the client may have closed the connection
	}))
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL}
}

// TestHostileAPIs: the APIs of a cluster are neither read without end nor written to a status that cannot have them.
// One condition has the reason, and the status keeps the APIs that were known before.
func TestHostileAPIs(t *testing.T) {
	t.Parallel()
	list := func(resources ...string) string {
		return `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"g0/v1","resources":[` + strings.Join(resources, ",") + `]}`
	}
	many := make([]string, 5001)
	for i := range many {
		many[i] = fmt.Sprintf(`{"name":"k%d","kind":"K%d"}`, i, i)
	}
	known := []clusterv1alpha1.APIEnablement{{GroupVersion: "v1"}}
	for name, test := range map[string]struct {
		cfg  *rest.Config
		want string
	}{
		"responses without end": {hostileAPIs(t, 500, list(`{"name":"`+strings.Repeat("x", 200<<10)+`"}`)), "the cluster returned more than 16 MiB or 800000 values"},
		"many groups":           {hostileAPIs(t, 1001, list()), "the cluster serves more than 1000 API versions without aggregated discovery"},
		"many resources":        {hostileAPIs(t, 1, list(many...)), "the cluster serves more than 5000 resources in g0/v1"},
	} {
		status := observe(t, test.cfg, clocktesting.NewFakePassiveClock(noon)).Observe(t.Context(), clusterv1alpha1.ClusterStatus{APIEnablements: known}, nil)
		if got, want := condition(status, clusterv1alpha1.ClusterConditionCompleteAPIEnablements), "False/Empty the APIs cannot be listed: "+test.want+" @ 0s"; got != want {
			t.Errorf("%s: CompleteAPIEnablements is %q, want %q", name, got, want)
		}
		if diff := cmp.Diff(status.APIEnablements, known); diff != "" {
			t.Errorf("%s: got -, want +\n%s", name, diff)
		}
	}
}
