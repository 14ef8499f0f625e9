package deliver

import (
	"crypto/sha256"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

func sum(raw []byte) []byte {
	hash := sha256.Sum256(raw)
	return hash[:]
}

func TestReportsRoundTripThroughGroupStatus(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle())
	group.Generation = 3
	digest := bundle.DigestFromBytes(group.Spec.RequestorHash)
	older := bundle.DigestFromBytes(sum([]byte("older")))
	applied := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	id := testBundle().ID
	outdated := []bundle.OutdatedRelease{{Namespace: "a", Name: "adopted", Revision: 3, IsUpgrade: true}, {Namespace: "a", Name: "failed", Revision: 2}}
	tests := map[string]struct{ in, want bundle.Report }{
		"applied": {
			in:   bundle.Report{ID: id, Digest: digest, State: bundle.StateApplied, Kinds: []string{"ConfigMap.v1."}, LastApplied: applied.Add(5 * time.Millisecond)},
			want: bundle.Report{ID: id, Digest: digest, State: bundle.StateApplied, Kinds: []string{"ConfigMap.v1."}, LastApplied: applied},
		},
		"failed": {
			in:   bundle.Report{ID: id, Digest: digest, State: bundle.StateFailed, Message: "ConfigMap default/a: no"},
			want: bundle.Report{ID: id, Digest: digest, State: bundle.StateFailed, Message: "ConfigMap default/a: no"},
		},
		"applying": {
			in:   bundle.Report{ID: id, Digest: digest, State: bundle.StateApplying, Message: "waiting for a hook"},
			want: bundle.Report{ID: id, Digest: digest, State: bundle.StateApplying, Message: "waiting for a hook"},
		},
		"outdated": {
			in:   bundle.Report{ID: id, Digest: digest, State: bundle.StateApplying, Message: "waiting", Outdated: outdated},
			want: bundle.Report{ID: id, Digest: digest, State: bundle.StateApplying, Message: "waiting", Outdated: outdated},
		},
		"missing": {
			in:   bundle.Report{ID: id, Digest: digest, State: bundle.StateMissing, Message: "bundle eu/config-x"},
			want: bundle.Report{ID: id, Digest: digest, State: bundle.StateMissing, Message: "content is missing: bundle eu/config-x"},
		},
		"about an older bundle": {
			in:   bundle.Report{ID: id, Digest: older, State: bundle.StateApplied},
			want: bundle.Report{ID: id, Digest: older, State: bundle.StateApplied},
		},
		"removing": {in: bundle.Report{ID: id, State: bundle.StateRemoving}, want: bundle.Report{ID: id, Digest: digest, State: bundle.StateRemoving}},
		"removed":  {in: bundle.Report{ID: id, State: bundle.StateRemoved}, want: bundle.Report{ID: id, Digest: digest, State: bundle.StateRemoved}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reported := group.DeepCopy()
			reported.Status = statusFor(reported, reported.Status, tc.in)
			if diff := cmp.Diff(tc.want, ReportOf(viaJSON(t, reported))); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			if again := statusFor(reported, reported.Status, tc.in); !isSameReport(reported.Status, again) {
				t.Error("an equal report changes the status")
			}
		})
	}
}

func TestStatusOfAnotherGenerationIsNoReport(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle())
	group.Generation = 3
	group.Status = statusFor(group, group.Status, bundle.Report{State: bundle.StateRemoved})
	group.Generation = 4
	want := bundle.Report{ID: testBundle().ID, State: bundle.StatePending}
	if diff := cmp.Diff(want, ReportOf(group)); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}

func TestLongMessagesAreTruncated(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle())
	group.Status = statusFor(group, group.Status, bundle.Report{State: bundle.StateFailed, Message: strings.Repeat("é", 1<<20)})
	if n := len(group.Status.FailureMessage); n > kube.MaxMessage {
		t.Errorf("message: got %d bytes", n)
	}
}

func TestAgentIgnoresRequestsThatItMustNotExecute(t *testing.T) {
	t.Parallel()
	group, _ := pack(t, testBundle())
	for name, tc := range map[string]struct {
		change func(*libv1beta1.ConfigurationGroup)
		want   bool
	}{
		"ready":        {change: func(*libv1beta1.ConfigurationGroup) {}, want: true},
		"preparing":    {change: func(g *libv1beta1.ConfigurationGroup) { g.Spec.UpdatePhase = libv1beta1.UpdatePhasePreparing }},
		"dry run":      {change: func(g *libv1beta1.ConfigurationGroup) { g.Spec.DryRun = true }},
		"no requestor": {change: func(g *libv1beta1.ConfigurationGroup) { g.Annotations = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			changed := group.DeepCopy()
			tc.change(changed)
			if _, ok := newDelivery(changed); ok != tc.want {
				t.Errorf("got %v, want %v", ok, tc.want)
			}
		})
	}
}

func TestResponsesAreLimited(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		block := make([]byte, 1<<20)
		for range 80 {
			if _, err := w.Write(block); err != nil {
				return
			}
			if r.URL.Path == "/short" {
				return
			}
		}
	}))
	defer server.Close()
	client, err := rest.HTTPClientFor(LimitResponses(&rest.Config{Host: server.URL}))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]struct {
		size int64
		err  error
	}{
		"/short":           {size: 1 << 20},
		"/long":            {size: maxResponse, err: errTooLong},
		"/long?watch=true": {size: 80 << 20},
	} {
		t.Run(path, func(t *testing.T) {
			response, err := client.Get(server.URL + path)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			n, err := io.Copy(io.Discard, response.Body)
			if n != want.size || !errors.Is(err, want.err) {
				t.Errorf("got %d bytes and error %v, want %d and %v", n, err, want.size, want.err)
			}
		})
	}
}
