package engine_test

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// deleteRecords deletes the Secrets of records with this value of the label towline.dev/record.
func (c *cluster) deleteRecords(part string) {
	c.t.Helper()
	err := c.objects.Resource(secrets).Namespace(c.records).DeleteCollection(c.t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: "towline.dev/record=" + part})
	if err != nil {
		c.t.Fatal(err)
	}
}

// corruptRecords overwrites one key in the head Secrets of records.
func (c *cluster) corruptRecords(key string) {
	c.t.Helper()
	api := c.objects.Resource(secrets).Namespace(c.records)
	list, err := api.List(c.t.Context(), metav1.ListOptions{LabelSelector: "towline.dev/record=head"})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, item := range list.Items {
		body := fmt.Sprintf(`{"data":{%q:"AAAA"}}`, key)
		if _, err := api.Patch(c.t.Context(), item.GetName(), types.MergePatchType, []byte(body), metav1.PatchOptions{}); err != nil {
			c.t.Fatal(err)
		}
	}
}

// largeBundle returns a bundle whose content does not fit into the head Secret of its record.
func (c *cluster) largeBundle(name string) bundle.Bundle {
	var objects []*unstructured.Unstructured
	for i := range 3 {
		var text strings.Builder
		for j := range 200 {
			text.WriteString(randomText(200*i + j))
		}
		objects = append(objects, c.configMap(fmt.Sprintf("%s-%d", name, i), text.String()))
	}
	return c.bundle(name, objects...)
}

func TestLostRecordIsDetected(t *testing.T) {
	t.Parallel()
	for name, part := range map[string]string{"head": "head", "chunk": "chunk"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			h := c.runEngine(t, nil)
			b := c.largeBundle("one")
			b.Inputs = "inputs"
			converge(t, h.Engine, b)
			if h.countReports() != 0 {
				t.Fatalf("got %d reports before the loss, want none", h.countReports())
			}
			c.deleteRecords(part)
			eventually(t, "the loss is reported", func() bool { return h.countReports() > 0 })
			if _, _, ok, err := h.RecordedDigest(t.Context(), b.ID); ok || err != nil {
				t.Errorf("RecordedDigest: got %t, %v; want no content", ok, err)
			}
			// Without inputs, the caller converges again.
			if found, _, err := h.FindDeployed(t.Context(), b.ID); found.Inputs != "" || err != nil {
				t.Errorf("inputs of lost content: got %q, %v", found.Inputs, err)
			}
			converge(t, h.Engine, b)
			if found, _, err := h.FindDeployed(t.Context(), b.ID); found.Inputs != b.Inputs || err != nil {
				t.Errorf("inputs after another delivery: got %q, %v", found.Inputs, err)
			}
			if _, _, ok, err := c.engine(nil).RecordedDigest(t.Context(), b.ID); !ok || err != nil {
				t.Errorf("RecordedDigest after another delivery: got %t, %v", ok, err)
			}
		})
	}
}

func TestWithdrawnRecordIsNotReportedAsLost(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	h := c.runEngine(t, nil)
	b := c.largeBundle("one")
	converge(t, h.Engine, b)
	withdraw(t, h.Engine, bundle.Withdrawal{ID: b.ID})
	// The report of a later loss proves that the engine has processed all earlier watch events.
	other := c.bundle("other", c.configMap("x", "1"))
	converge(t, h.Engine, other)
	c.deleteRecords("head")
	eventually(t, "the loss is reported", func() bool { return h.countReports() > 0 })
	if h.countReports() != 1 {
		t.Errorf("got %d reports, want 1", h.countReports())
	}
}

func TestWithdrawWithoutARecord(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*cluster){
		"the head is lost":         func(c *cluster) { c.deleteRecords("head") },
		"a chunk is lost":          func(c *cluster) { c.deleteRecords("chunk") },
		"the inventory is invalid": func(c *cluster) { c.corruptRecords("inventory") },
		"the head is invalid":      func(c *cluster) { c.corruptRecords("head") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.create(configMaps, c.configMap("adopted", "0"))
			b := c.largeBundle("one")
			b.Items[0].Objects = append(b.Items[0].Objects, c.configMap("adopted", "1"))
			converge(t, c.engine(nil), b)
			converge(t, c.engine(nil), c.bundle("other", c.configMap("others", "1")))
			c.copyWithLabels("one-0")
			lose(c)
			withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
			c.wantNames(configMaps, "copy", "others")
			adopted := c.get(configMaps, c.ns, "adopted")
			if adopted == nil || adopted.GetAnnotations()[kube.AnnotationRequestor] != "" {
				t.Errorf("existing object: got %v, want it without ownership annotations", adopted)
			}
		})
	}
}

func TestWithdrawWithoutARecordOrphansObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("a", "1"))
	converge(t, c.engine(nil), b)
	c.deleteRecords("head")
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID, Orphan: true})
	c.wantNames(configMaps)
	if c.value("a") != "1" {
		t.Error("the object was deleted")
	}
	c.wantRecords(0)
}

// copyWithLabels copies a ConfigMap as another client, with all labels and annotations.
func (c *cluster) copyWithLabels(name string) {
	c.t.Helper()
	original, duplicate := c.get(configMaps, c.ns, name), c.configMap("copy", "1")
	duplicate.SetLabels(original.GetLabels())
	duplicate.SetAnnotations(original.GetAnnotations())
	c.create(configMaps, duplicate)
}

func TestWithdrawWithoutARecordKeepsCopiesOfControllers(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("child", "1"))
	converge(t, c.engine(nil), b)
	parent := c.create(configMaps, c.configMap("parent", "1"))
	c.patch(configMaps, "child", fmt.Sprintf(`{"metadata":{"ownerReferences":[
		{"apiVersion":"v1","kind":"ConfigMap","name":"parent","uid":%q,"controller":true}]}}`, parent.GetUID()))
	c.deleteRecords("head")
	withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
	c.wantNames(configMaps, "child")
}

// breakAPIs returns a transport without aggregated discovery, in which the discovery of one API group and the lists of
// another group fail. code is the status of the lists.
func breakAPIs(code int) func(http.RoundTripper) http.RoundTripper {
	return func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			switch where := r.URL.Path; {
			case where == "/api" || where == "/apis":
				r = r.Clone(r.Context())
				r.Header.Set("Accept", "application/json")
			case strings.HasPrefix(where, "/apis/batch/"):
				return errorResponse(r, http.StatusServiceUnavailable), nil
			case strings.HasPrefix(where, "/apis/apps/v1/"):
				return errorResponse(r, code), nil
			}
			return next.RoundTrip(r)
		})
	}
}

func errorResponse(r *http.Request, code int) *http.Response {
	reason := metav1.StatusReasonServiceUnavailable
	if code == http.StatusInternalServerError {
		reason = metav1.StatusReasonInternalError
	}
	body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":"broken","reason":%q,"code":%d}`, reason, code)
	return &http.Response{
		StatusCode: code, Request: r, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)),
	}
}

func TestWithdrawWithoutARecordFromABrokenCluster(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusServiceUnavailable, http.StatusInternalServerError} {
		t.Run(http.StatusText(code), func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			b := c.bundle("one", c.configMap("a", "1"))
			converge(t, c.engine(nil), b)
			c.deleteRecords("head")
			broken := *c
			broken.cfg = rest.CopyConfig(c.cfg)
			broken.cfg.Wrap(breakAPIs(code))
			e := broken.engine(nil)
			withdraw(t, e, bundle.Withdrawal{ID: b.ID})
			c.wantNames(configMaps)
			withdraw(t, e, bundle.Withdrawal{ID: c.bundle("never applied").ID})
			// The engine can also deliver.
			converge(t, e, b)
		})
	}
}

func TestOtherContentAfterALostRecordIsPruned(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*cluster){
		"the head is lost":         func(c *cluster) { c.deleteRecords("head") },
		"the inventory is invalid": func(c *cluster) { c.corruptRecords("inventory") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCluster(t)
			c.create(configMaps, c.configMap("adopted", "0"))
			converge(t, c.engine(nil), c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"), c.configMap("adopted", "1")))
			c.copyWithLabels("a")
			lose(c)
			b := c.bundle("one", c.configMap("b", "2"), c.configMap("c", "1"))
			wantChanges(t, converge(t, c.engine(nil), b).Changes, counts{bundle.Created: 1, bundle.Configured: 1, bundle.Deleted: 1, bundle.Skipped: 1})
			c.wantNames(configMaps, "b", "c", "copy")
			withdraw(t, c.engine(nil), bundle.Withdrawal{ID: b.ID})
			c.wantNames(configMaps, "copy")
			c.wantRecords(0)
		})
	}
}

func TestLostRecordWithUnreadableObjectIsPruned(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	b := c.bundle("one", c.configMap("a", "1"), c.configMap("b", "1"))
	b.Options.ContinueOnError = true
	converge(t, c.engine(nil), b)
	c.deleteRecords("head")
	b.Items[0].Objects = b.Items[0].Objects[:1]
	broken := *c
	broken.cfg = rest.CopyConfig(c.cfg)
	broken.cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if strings.HasSuffix(r.URL.Path, "/configmaps/a") {
				return errorResponse(r, http.StatusInternalServerError), nil
			}
			return next.RoundTrip(r)
		})
	})
	wantConvergeError(t, broken.engine(nil), b)
	c.wantNames(configMaps, "a", "b")
	converge(t, c.engine(nil), b)
	c.wantNames(configMaps, "a")
}
