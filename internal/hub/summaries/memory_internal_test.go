package summaries

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// useHubOfTwoGiB gives the hub the memory of a container of 2 GiB: 128 MiB of content for a namespace.
func (r *restarts) useHubOfTwoGiB() {
	limit := debug.SetMemoryLimit(1 << 30)
	r.pool = sandbox.NewPool(nil, clock.RealClock{}) // no template starts a child
	debug.SetMemoryLimit(limit)
}

// TestMemoryOfContent has a profile whose manifests need 4 MiB each until they are delivered, and three times as much
// while they are decoded.
func TestMemoryOfContent(t *testing.T) { //nolint:paralleltest // it changes the memory limit of the process
	r := newRestarts(t)
	r.useHubOfTwoGiB()
	r.feature = libv1beta1.FeatureResources
	var refs []libv1beta1.PolicyRef
	for i := range 35 {
		name := fmt.Sprint("content-", i)
		text := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s}\nx: [%s]\n", name, strings.Repeat("{a: 0},", 10_000))
		r.must(r.hub.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: name}, Data: map[string]string{"a.yaml": text}}))
		refs = append(refs, libv1beta1.PolicyRef{Kind: libv1beta1.SourceConfigMap, Namespace: "fleet", Name: name})
	}
	check := func(status libv1beta1.FeatureStatus, message string, manifests int) {
		t.Helper()
		s := r.summary()
		r.update(s, func() { s.Spec.ClusterProfileSpec.PolicyRefs = refs[:manifests] })
		got := r.reconcile()
		if got.Status != status || !strings.Contains(got.FailureMessage, message) || (message == "") != (got.FailureMessage == "") {
			t.Errorf("got %s, %q, want %s, %q", got.Status, got.FailureMessage, status, message)
		}
	}
	check(libv1beta1.FeatureStatusFailed, "its objects, texts and values need too much memory: more than 128 MiB", 35)
	other := r.pool.Memory().Reserve("fleet") // another profile
	r.must(other.Add(100 << 20))
	check(libv1beta1.FeatureStatusFailed, "the hub has not enough memory for it at the moment, and tries again: the content for all clusters in a namespace has a common limit", 10)
	other.Release()
	check(libv1beta1.FeatureStatusProvisioned, "", 10)
	all := r.pool.Memory().Reserve("fleet")
	defer all.Release()
	if err := all.Add(128 << 20); err != nil {
		t.Errorf("after all reconciles: %v", err)
	}
}

// TestNamespaceWithoutMemory has a ClusterProfile for clusters in two namespaces. One namespace has no memory left, and
// only its cluster is slow. The cluster in the other one gets its content, also if it waits for the same rendering.
func TestNamespaceWithoutMemory(t *testing.T) { //nolint:paralleltest // it changes the memory limit of the process
	r := newRestarts(t)
	r.useHubOfTwoGiB()
	large := content("content", "")
	r.update(large, func() { large.Data = content("content", strings.Repeat("x", 1<<20)).Data })
	patch := "- target: {kind: Secret}\n  patch: '{apiVersion: v1, kind: Secret, metadata: {name: a, annotations: {a: " + strings.Repeat("x", 10_000) + "}}}'\n"
	r.must(r.hub.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "fleet", Name: "patches"}, Data: map[string]string{"a": patch}}))
	summary := r.summary()
	r.update(summary, func() {
		summary.Spec.ClusterProfileSpec.PatchesFrom = []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromConfigMap, Namespace: "fleet", Name: "patches"}}
	})
	c := &Controller{Hub: r.hub, Composer: newTestComposer(r)}
	compose := func(namespace string) (*state, error) {
		member := fleet.Member{Type: fleet.TypeSveltos, Mode: fleet.Pull, Namespace: namespace, Name: "one"}
		s := newState(r.summary(), &libv1beta1.SveltosCluster{}, member)
		defer func() { s.memory.Release() }()
		request, err := c.newComposeRequest(s)
		if err != nil {
			return s, err
		}
		_, err = c.composeFeature(t.Context(), s, request, libv1beta1.FeatureResources)
		if err != nil {
			s.addFailedResult(libv1beta1.FeatureResources, err)
		}
		return s, err
	}
	full := r.pool.Memory().Reserve("full")
	defer full.Release()
	r.must(full.Add(128 << 20))
	var failures sync.WaitGroup
	for range 8 {
		failures.Go(func() {
			s, err := compose("full")
			if err != nil && !errors.Is(err, kube.ErrMemoryInUse) { // it succeeds while it shares the objects of another one
				t.Errorf("the namespace without memory: got %v", err)
			}
			if keys := slowKeys(s, s.member); len(keys) > 1 || len(keys) == 1 && keys[0] != clusterKey(s.member) {
				t.Errorf("slow keys %q, want at most the cluster", keys)
			}
		})
	}
	for i := range 20 {
		if _, err := compose(fmt.Sprint("other-", i)); err != nil {
			t.Errorf("another namespace: %v", err)
		}
	}
	failures.Wait()
	s, err := compose("full")
	if keys := slowKeys(s, s.member); err == nil || len(keys) != 1 {
		t.Errorf("alone without memory: slow keys %q, error %v", keys, err)
	}
}

// TestMemoryErrorOfAnotherClusterIsNotSlow has a cluster that waited for the rendering of another one without memory.
func TestMemoryErrorOfAnotherClusterIsNotSlow(t *testing.T) {
	t.Parallel()
	memory := kube.NewContentMemory(64 << 20)
	s := &state{summary: &configv1beta1.ClusterSummary{}, memory: memory.Reserve("one")}
	s.addFailedResult(libv1beta1.FeatureResources, memory.Reserve("two").Add(100<<20))
	if s.isClusterSlow || s.isProfileSlow {
		t.Error("the cluster is slow because another one has no memory")
	}
	s.addFailedResult(libv1beta1.FeatureResources, s.memory.Add(100<<20))
	if !s.isClusterSlow {
		t.Error("the cluster without memory is not slow")
	}
}

// TestReferencesWithoutMemory has a reference whose name is a template, and no memory for its input. The object
// is still watched.
func TestReferencesWithoutMemory(t *testing.T) { //nolint:paralleltest // it changes the memory limit of the process
	r := newRestarts(t)
	r.useHubOfTwoGiB()
	r.feature = libv1beta1.FeatureResources
	summary := r.summary()
	name := "{{/* " + strings.Repeat("x", 1<<20) + " */}}content"
	r.update(summary, func() {
		summary.Spec.ClusterProfileSpec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: libv1beta1.SourceConfigMap, Namespace: "fleet", Name: name}}
	})
	key, content := client.ObjectKeyFromObject(summary), source.Reference{Kind: "ConfigMap", Namespace: "fleet", Name: "content"}
	r.references = newReferenceIndex()
	r.references.set(key, []source.Reference{content})
	full := r.pool.Memory().Reserve("fleet")
	defer full.Release()
	r.must(full.Add(128 << 20))
	if got := r.reconcile(); got.Status != libv1beta1.FeatureStatusFailed || !strings.Contains(got.FailureMessage, kube.ErrMemoryInUse.Error()) {
		t.Errorf("got %s, %q", got.Status, got.FailureMessage)
	}
	if got := r.references.summariesFor(content); !slices.Contains(got, key) {
		t.Errorf("%s is watched for %v, want also %s", content, got, key)
	}
}
