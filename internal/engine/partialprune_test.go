package engine_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/bundle"
)

func (c *cluster) namespace(name string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": name},
	}}
}

// items returns items with the objects of ConfigMap a, ConfigMap b and release r.
func (c *cluster) items(a, b, r []*unstructured.Unstructured) []bundle.Item {
	return []bundle.Item{
		{Objects: a, Reference: reference("a", 100)}, {Objects: b, Reference: reference("b", 100)},
		{Objects: r, Release: &bundle.Release{Namespace: c.ns, Name: "r"}},
	}
}

func TestPruneAfterFailures(t *testing.T) {
	t.Parallel()
	type objects = []*unstructured.Unstructured
	for name, test := range map[string]struct {
		options bundle.Options
		items   func(c *cluster) []bundle.Item
		want    []string // ConfigMaps with the ownership label after the run
		message string   // end of the message
	}{
		"continues; the other origins are complete": {
			bundle.Options{ContinueOnError: true},
			func(c *cluster) []bundle.Item {
				return c.items(objects{c.invalidObject()}, objects{c.configMap("b-new", "1")}, nil)
			},
			[]string{"a-old", "b-new"}, "; 2 objects are deleted after that", // a-old and the Namespace
		},
		"continues; an origin is dropped": {
			bundle.Options{ContinueOnError: true},
			func(c *cluster) []bundle.Item { return c.items(objects{c.invalidObject()}, nil, nil)[:1] },
			[]string{"a-old"}, "; 2 objects are deleted after that",
		},
		"continues; the failed origin drops nothing": {
			bundle.Options{ContinueOnError: true},
			func(c *cluster) []bundle.Item {
				return c.items(objects{c.invalidObject(), c.configMap("a-old", "1"), c.namespace(c.ns + "-extra")}, nil, nil)
			},
			[]string{"a-old"}, "",
		},
		"continues; an item with an error": {
			bundle.Options{ContinueOnError: true},
			func(c *cluster) []bundle.Item {
				return append(c.items(objects{c.configMap("a-old", "1")}, nil, nil), bundle.Item{DecodeError: "it cannot be decoded"})
			},
			[]string{"a-old", "b-old", "r-old"}, "; 3 objects are deleted after that",
		},
		"stops": {
			bundle.Options{},
			func(c *cluster) []bundle.Item {
				return c.items(objects{c.invalidObject()}, objects{c.configMap("b-new", "1")}, nil)
			},
			[]string{"a-old", "b-old", "r-old"}, "; 4 objects are deleted after that",
		},
		"continues, but not after a conflict": {
			bundle.Options{ContinueOnError: true},
			func(c *cluster) []bundle.Item {
				service := decode(c.t, "{apiVersion: v1, kind: Service, metadata: {name: b, namespace: "+c.ns+"}, spec: {ports: [{port: 80}]}}")
				return c.items(objects{c.configMap("others", "2")}, service, nil)
			},
			[]string{"a-old", "b-old", "others"}, "; 3 objects are deleted after that", // and the Namespace
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			e := c.engine(nil)
			if strings.Contains(name, "conflict") {
				converge(t, e, c.bundle("other", c.configMap("others", "1")))
			}
			b := c.bundle("one")
			b.Items = c.items(objects{c.configMap("a-old", "1"), c.namespace(c.ns + "-extra")}, objects{c.configMap("b-old", "1")}, objects{c.configMap("r-old", "1")})
			converge(t, e, b)
			test.options.CorrectDrift = true
			b.Options, b.Items = test.options, test.items(c)
			report := wantConvergeError(t, e, b)
			if diff := cmp.Diff(c.listNames(configMaps), test.want); diff != "" {
				t.Errorf("ConfigMaps after the failure (-got +want):\n%s", diff)
			}
			if c.get(namespaces, "", c.ns+"-extra").GetDeletionTimestamp() != nil {
				t.Error("the Namespace is deleted after a failure")
			}
			_, end, _ := strings.Cut(report.Message, "; ")
			if end != strings.TrimPrefix(test.message, "; ") {
				t.Errorf("message: got %q, want it to end with %q", report.Message, test.message)
			}
			if again := wantConvergeError(t, c.engine(nil), b); again.Message != report.Message {
				t.Errorf("messages of the same failure differ: %q and %q", report.Message, again.Message)
			}
			b.Items = c.items(objects{c.configMap("a-new", "1")}, nil, nil)
			converge(t, e, b)
			want := []string{"a-new"}
			if strings.Contains(name, "conflict") {
				want = append(want, "others")
			}
			if diff := cmp.Diff(c.listNames(configMaps), want); diff != "" {
				t.Errorf("ConfigMaps after the success (-got +want):\n%s", diff)
			}
		})
	}
}

// invalidObject returns an object that the API server refuses.
func (c *cluster) invalidObject() *unstructured.Unstructured {
	bad := c.configMap("a-new", "1")
	bad.Object["data"] = map[string]any{"not a key!": "1"}
	return bad
}
