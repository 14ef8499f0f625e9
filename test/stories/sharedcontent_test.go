package stories

import (
	"fmt"
	"strings"
	"testing"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// sharers is the number of pull members with the same profile.
	sharers = 3
	// password is in the Secrets of the profile.
	password = "correct-horse-battery-staple"
)

// TestSharedContent deploys large content with a Secret, and content from a Secret, to several pull members. Content
// without secrets is created once on the hub, and the other content once for each member; all is deleted after it is
// applied.
func TestSharedContent(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	planes := w.planes(sharers)
	for i, plane := range planes {
		w.runCrowdMember(plane, sharer(i), "sharers")
	}
	for i := range sharers {
		w.awaitReady(sharer(i), sharer(i))
	}
	text := noise(1, 200<<10)
	w.apply(w.hub, fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: mixed}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: before}
    data: {text: %[1]q}
    ---
    apiVersion: v1
    kind: Secret
    metadata: {namespace: default, name: login}
    stringData: {password: %[2]s}
    ---
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: after}
---
apiVersion: v1
kind: Secret
metadata: {namespace: default, name: private}
type: addons.projectsveltos.io/cluster-profile
stringData:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: from-secret}
    data: {password: %[2]s}
`, text, password))
	payloads := w.watchPayloads()
	seen := w.watchRollout()
	before := w.requests(w.hub)
	w.apply(w.hub, `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: shared}
spec:
  clusterSelector: {matchLabels: {env: crowd}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: mixed}
  - {kind: Secret, namespace: default, name: private}
`)
	for i, plane := range planes {
		w.awaitProvisioned(sharer(i), "shared-sveltos-"+sharer(i))
		for _, name := range []string{"configmap/before", "secret/login", "configmap/after", "configmap/from-secret"} {
			w.kubectl(plane, "get", name, "-n", "default")
		}
	}
	seen.awaitNoBundles()

	creation := localkube.Request{Verb: "POST", Group: libv1beta1.GroupVersion.Group, Resource: "configurationbundles"}
	const shared, private = 2, 2 // bundles: before and after the Secret; the Secret, and the content from a Secret
	if got, want := w.requests(w.hub).Since(before)[creation], shared+private*sharers; got != want {
		t.Errorf("requests to create bundles: got %d, want %d", got, want)
	}
	contents := payloads.contents(w)
	if got := len(contents[kube.AgentNamespace]); got != shared {
		t.Errorf("shared bundles: got %d, want %d", got, shared)
	}
	for namespace, all := range contents {
		isShared := namespace == kube.AgentNamespace
		if !isShared && len(all) != private {
			t.Errorf("bundles in %s: got %d, want %d", namespace, len(all), private)
		}
		for _, content := range all {
			if isSecret := strings.Contains(content, password); isSecret == isShared {
				t.Errorf("a bundle in %s has the password: %t", namespace, isSecret)
			}
			if strings.Contains(content, text) && !isShared {
				t.Errorf("the large ConfigMap is in %s", namespace)
			}
		}
	}
	payloads.wantEncrypted(w)
	if bytes := seen.bundleBytes(); bytes > 2*len(text) {
		t.Errorf("%d bytes of bundles for %d bytes of content", bytes, len(text))
	}
}

func sharer(i int) string { return fmt.Sprintf("sharer-%d", i) }
