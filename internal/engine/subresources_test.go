package engine_test

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
)

var services = schema.GroupVersionResource{Version: "v1", Resource: "services"}

const serviceWithStatus = `
apiVersion: v1
kind: Service
metadata: {name: it}
spec: {type: LoadBalancer, ports: [{port: 80}]}
status: {loadBalancer: {ingress: [{ip: %s}]}}
`

// TestSubresourcesAreApplied applies the status of objects whose item lists it, when they are created and changed.
func TestSubresourcesAreApplied(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	address := func() string {
		list, _, _ := unstructured.NestedSlice(c.get(services, c.ns, "it").Object, "status", "loadBalancer", "ingress")
		if len(list) == 0 {
			return ""
		}
		return fmt.Sprint(list[0].(map[string]any)["ip"])
	}
	delivery := func(ip string, subresources ...string) bundle.Bundle {
		b := c.bundle("one", c.parse(fmt.Sprintf(serviceWithStatus, ip)), c.configMap("no-status", "1"))
		b.Items[0].Subresources = subresources
		return b
	}
	for _, step := range []struct {
		bundle bundle.Bundle
		want   string
	}{
		{delivery("10.0.0.1"), ""},
		{delivery("10.0.0.1", "status"), "10.0.0.1"}, // the content is the same
		{delivery("10.0.0.2", "status"), "10.0.0.2"},
	} {
		converge(t, c.engine(nil), step.bundle)
		if got := address(); got != step.want {
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

// TestUnknownSubresource fails with the name of the subresource, and applies the object.
func TestUnknownSubresource(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("it", "1"))
	b.Items[0].Subresources = []string{"nothing"}
	report := convergeFails(t, c.engine(nil), b)
	if !strings.Contains(report.Message, "apply subresource nothing") || !strings.Contains(report.Message, "it") {
		t.Errorf("message: %s", report.Message)
	}
	b.Items[0].Subresources = nil
	converge(t, c.engine(nil), b)
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps)
}
