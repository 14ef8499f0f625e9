package summaries

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

// TestURLs reconciles a summary with a URL: before and after the first response, without a change, with other content,
// and after the URL is removed.
func TestURLs(t *testing.T) {
	t.Parallel()
	var value atomic.Value
	value.Store("1")
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = w.Write([]byte(content("remote", value.Load().(string)).Data["objects.yaml"]))
	}))
	t.Cleanup(server.Close)
	r := newRestarts(t)
	r.remote = source.NewRemoteFetcher(r, clock.RealClock{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.remote.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		r.must(<-done)
	})
	summary := &configv1beta1.ClusterSummary{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "web-one"}}
	setRefs := func(refs ...libv1beta1.PolicyRef) {
		r.update(summary, func() {
			summary.Spec.ClusterProfileSpec.PolicyRefs = refs
			summary.Generation++
		})
	}
	interval := &metav1.Duration{Duration: time.Second}
	setRefs(libv1beta1.PolicyRef{RemoteURL: &libv1beta1.RemoteURL{RemoteSource: libv1beta1.RemoteSource{URL: server.URL + "/{{ .ClusterName }}", Interval: interval}}})
	if r.reconcile(); r.deliveries != 0 {
		t.Error("a bundle is delivered before the server responds")
	}
	close(release)
	awaitURL(t, r, server.URL+"/one")
	if feature := r.reconcile(); r.deliveries != 1 || feature.Status != libv1beta1.FeatureStatusProvisioned {
		t.Errorf("after the response: %d deliveries, %+v", r.deliveries, feature)
	}
	if r.reconcile(); r.deliveries != 0 {
		t.Error("unchanged content is built again")
	}
	value.Store("2")
	awaitURL(t, r, server.URL+"/one")
	if r.reconcile(); r.deliveries != 1 {
		t.Error("changed content is not delivered")
	}
	value.Store("not ' quoted")
	awaitURL(t, r, server.URL+"/one")
	if feature := r.reconcile(); r.deliveries != 0 || !strings.Contains(feature.FailureMessage, "URL "+server.URL+"/one") {
		t.Errorf("invalid content: %d deliveries, %+v", r.deliveries, feature)
	}
	setRefs(libv1beta1.PolicyRef{Kind: "ConfigMap", Namespace: "fleet", Name: "content"})
	if r.reconcile(); r.remote.Size() != 0 {
		t.Error("the content is not freed")
	}
}

// awaitURL waits until the fetcher reports a change of a URL.
func awaitURL(t *testing.T, r *restarts, address string) {
	t.Helper()
	select {
	case changed := <-r.remote.Changes():
		if changed.Object.URL != address {
			t.Errorf("%s has changed, want %s", changed.Object.URL, address)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("no change was reported")
	}
}

// TestReferencesHaveLoginsOfURLs looks for the URL, with its Secret, in the references of a summary.
func TestReferencesHaveLoginsOfURLs(t *testing.T) {
	t.Parallel()
	remote := &libv1beta1.RemoteURL{RemoteSource: libv1beta1.RemoteSource{URL: "https://host/a.yaml"}}
	remote.SecretRef = &corev1.SecretReference{Name: "{{ .ClusterName }}"}
	request := ComposeRequest{Summary: &configv1beta1.ClusterSummary{}, TemplateContext: source.TemplateContext{Namespace: "fleet", Name: "one"}}
	request.Summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{RemoteURL: remote}}
	got := (&Composer{}).References(request)
	want := []source.Reference{
		{Kind: source.KindURL, URL: "https://host/a.yaml", Namespace: "fleet", Name: "one"}, {Kind: "Secret", Namespace: "fleet", Name: "one"},
	}
	if len(got) != len(want) || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %v, want %v", got, want)
	}
	if uses := (&Composer{}).RemoteUses(request); len(uses) != 1 || uses[0].Reference != want[0] || uses[0].Interval != 5*time.Minute {
		t.Errorf("got uses %v", uses)
	}
}

// TestURLThatChangesWhileABundleIsBuilt has content that is replaced between the inputs of a bundle and the bundle. If
// the URL has its former content later, the bundle must be built again.
func TestURLThatChangesWhileABundleIsBuilt(t *testing.T) {
	t.Parallel()
	first := InputObject{Reference: source.Reference{Kind: source.KindURL, URL: "https://host/a.yaml"}, Version: "sha256:1 false"}
	changed := first
	changed.Version = "sha256:2 false"
	object := InputObject{Reference: source.Reference{Kind: "ConfigMap", Namespace: "fleet", Name: "a"}, UID: "a", Version: "1"}
	inputs := currentInputs{BundleInputs: BundleInputs{Objects: []InputObject{first, object}}, isKnown: true}
	digest, err := inputs.Digest()
	if err != nil {
		t.Fatal(err)
	}
	object.UID, object.Version = "", ""
	for name, test := range map[string]struct {
		contents []InputObject
		want     string
	}{
		"the same":                {[]InputObject{first, object}, digest},
		"other content":           {[]InputObject{object, changed}, ""},
		"first other content":     {[]InputObject{changed, first}, ""},
		"content that disappears": {[]InputObject{{Reference: first.Reference}}, ""},
	} {
		got, err := inputs.digestFor(Composition{builtInputs: builtInputs{contents: test.contents}})
		if err != nil || got != test.want {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, test.want)
		}
	}

	// The composition has the version that was read.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(content("remote", "1").Data["objects.yaml"]))
	}))
	t.Cleanup(server.Close)
	r := newRestarts(t)
	r.remote = source.NewRemoteFetcher(r, clock.RealClock{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.remote.Start(ctx) }()
	t.Cleanup(func() {
		cancel()
		r.must(<-done)
	})
	summary := r.summary()
	remote := libv1beta1.RemoteSource{URL: server.URL}
	summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{RemoteURL: &libv1beta1.RemoteURL{RemoteSource: remote}}}
	request := ComposeRequest{Summary: summary, TemplateContext: source.TemplateContext{Namespace: "fleet", Name: "one"}}
	composer := newTestComposer(r)
	r.must(r.remote.SetUses(t.Context(), "web-one", composer.RemoteUses(request)))
	awaitURL(t, r, server.URL)
	composition, err := composer.Compose(t.Context(), request, libv1beta1.FeatureResources)
	reference := source.Reference{Kind: source.KindURL, URL: server.URL}
	if want := composer.urlInput(t.Context(), reference); err != nil || want.Version == "" || len(composition.contents) != 1 || composition.contents[0] != want {
		t.Errorf("got %+v, %v, want %+v", composition.contents, err, want)
	}
}
