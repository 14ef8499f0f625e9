package engine_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
)

var services = schema.GroupVersionResource{Version: "v1", Resource: "services"}

const serviceWithStatus = `
apiVersion: v1
kind: Service
metadata: {name: it, labels: {color: blue}}
spec: {type: LoadBalancer, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: %s}]}}
`

// TestSubresourcesAreApplied applies the status of new and changed objects whose item lists the subresource.
func TestSubresourcesAreApplied(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	delivery := func(ip string, subresources ...string) bundle.Bundle {
		b := c.service(ip, subresources...)
		b.Items[0].Objects = append(b.Items[0].Objects, c.configMap("no-status", "1"))
		return b
	}
	for _, step := range []struct {
		bundle bundle.Bundle
		want   string
	}{
		{delivery("10.0.0.1"), ""},
		{delivery("10.0.0.1", "status"), "10.0.0.1"}, // unchanged content
		{delivery("10.0.0.2", "status"), "10.0.0.2"},
	} {
		converge(t, c.engine(nil), step.bundle)
		if got := c.address(); got != step.want {
			t.Errorf("got address %q, want %q", got, step.want)
		}
	}
	m := &meter{}
	converge(t, c.engine(m), delivery("10.0.0.2", "status"))
	for _, request := range m.take() {
		if strings.HasPrefix(request, "PATCH") {
			t.Errorf("an unchanged object was written: %s", request)
		}
	}
}

// TestUnknownSubresource checks that the error names the subresource, and that the object is applied.
func TestUnknownSubresource(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("it", "1"))
	b.Items[0].Subresources = []string{"nothing"}
	report := wantConvergeError(t, c.engine(nil), b)
	if !strings.Contains(report.Message, "apply subresource nothing") || !strings.Contains(report.Message, "it") {
		t.Errorf("message: %s", report.Message)
	}
	b.Items[0].Subresources = nil
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
}

// TestSubresourcesHaveExclusions changes an excluded status as another client. The change stays. A Service that is
// created again gets the whole status.
func TestSubresourcesHaveExclusions(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	deliver := func(ip, want string) {
		t.Helper()
		b := c.service(ip, "status")
		b.Options.DriftExclusions = []libv1beta1.DriftExclusion{{Paths: []string{"/status/loadBalancer"}}}
		converge(t, c.engine(nil), b)
		if got := c.address(); got != want {
			t.Errorf("got address %q, want %q", got, want)
		}
	}
	deliver("10.0.0.1", "10.0.0.1")
	deliver("10.0.0.2", "10.0.0.1")
	_, err := c.objects.Resource(services).Namespace(c.ns).Patch(t.Context(), "it", types.MergePatchType,
		[]byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"10.0.0.9"}]}}}`), metav1.PatchOptions{FieldManager: "another"}, "status")
	if err != nil {
		t.Fatal(err)
	}
	deliver("10.0.0.3", "10.0.0.9")
	c.delete(services, "it")
	deliver("10.0.0.4", "10.0.0.4")
}

// TestInvalidStatus checks that each run fails, and that neither Force nor a withdrawal deletes a Service that another
// client has created.
func TestInvalidStatus(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ exists, meanwhile bool }{
		"of a new Service":                        {},
		"of a Service that was applied":           {exists: true},
		"of a Service that was created meanwhile": {meanwhile: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			if test.exists {
				converge(t, c.engine(nil), c.service("10.0.0.1"))
			}
			c.beforePatch("/services/it", func() {
				if test.meanwhile {
					c.create(services, c.service("").Items[0].Objects[0])
				}
			})
			b := c.service("no address", "status")
			b.Items[0].Force = true
			wantConvergeError(t, c.engine(nil), b)
			first := c.get(services, c.ns, "it")
			for range 2 { // the second run finds no drift
				report := wantConvergeError(t, c.engine(nil), b)
				if !strings.Contains(report.Message, "apply subresource status") {
					t.Errorf("message: %s", report.Message)
				}
			}
			if got := c.get(services, c.ns, "it"); got == nil || got.GetUID() != first.GetUID() {
				t.Errorf("the Service was created again: %v", got)
			}
			withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
			if got := c.get(services, c.ns, "it"); (got != nil) != test.meanwhile {
				t.Errorf("after the withdrawal: got %v", got)
			}
		})
	}
}

// TestDriftDuringTheStatus changes an object as another client after the apply request and before the status request.
func TestDriftDuringTheStatus(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	converge(t, c.engine(nil), c.service("10.0.0.1", "status"))
	c.beforePatch("/services/it/status", func() { c.patch(services, "it", `{"metadata":{"labels":{"color":"red"}}}`) })
	for range 2 {
		converge(t, c.engine(nil), c.service("10.0.0.2", "status"))
	}
	if got := c.get(services, c.ns, "it").GetLabels()["color"]; got != "blue" {
		t.Errorf("label: got %s", got)
	}
}

// service returns a bundle of a Service with this address in its status, or without status.
func (c *cluster) service(ip string, subresources ...string) bundle.Bundle {
	object := c.parseObject(fmt.Sprintf(serviceWithStatus, ip))
	if ip == "" {
		unstructured.RemoveNestedField(object.Object, "status")
	}
	b := c.bundle("one", object)
	b.Items[0].Subresources = subresources
	return b
}

// address returns the first address in the status of the Service.
func (c *cluster) address() string {
	c.t.Helper()
	list, _, _ := unstructured.NestedSlice(c.get(services, c.ns, "it").Object, "status", "loadBalancer", "ingress")
	if len(list) == 0 {
		return ""
	}
	return fmt.Sprint(list[0].(map[string]any)["ip"])
}

// beforePatch calls change once, right before an Engine sends its first apply request for a path with this suffix.
func (c *cluster) beforePatch(suffix string, change func()) {
	var once sync.Once
	c.cfg = rest.CopyConfig(c.cfg)
	c.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Header.Get("Content-Type") == string(types.ApplyPatchType) && strings.HasSuffix(r.URL.Path, suffix) {
				once.Do(change)
			}
			return next.RoundTrip(r)
		})
	})
}
