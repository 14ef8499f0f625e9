package stories

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/localkube"
)

const programmaticClusters = `
apiVersion: v1
kind: Namespace
metadata: {name: edge}
---
apiVersion: lib.projectsveltos.io/v1beta1
kind: SveltosCluster
metadata:
  namespace: edge
  name: first
  labels: {env: programmatic}
spec:
  pullMode: true
---
apiVersion: lib.projectsveltos.io/v1beta1
kind: SveltosCluster
metadata:
  namespace: edge
  name: second
  labels: {env: programmatic}
spec:
  pullMode: true
`

const programmaticProfile = `
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: programmatic}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: delivered}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: programmatic}
spec:
  clusterSelector: {matchLabels: {env: programmatic}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: programmatic}]
`

// TestProgrammaticRegistration registers two clusters with only kubectl apply: of a SveltosCluster on the hub, and of
// the manifest that the hub keeps on the member. It deregisters them with only kubectl delete.
func TestProgrammaticRegistration(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := map[string]*localkube.Plane{"first": w.member("first"), "second": w.member("second")}
	w.apply(w.hub, programmaticClusters)
	for name, plane := range members {
		applied := w.kubectlApply(plane, w.keptManifest("edge", name))
		if diff := cmp.Diff(appliedManifest+"secret/"+name+"-sveltos-kubeconfig created\n", applied); diff != "" {
			t.Errorf("kubectl apply of the kept manifest (-want +got):\n%s", diff)
		}
	}
	for name := range members {
		w.awaitReady("edge", name)
		w.eventually("the manifest of "+name+" is deleted after the registration", func() error {
			return w.wantMissing(w.hub, &corev1.Secret{}, name+"-sveltos-registration", "edge")
		})
	}
	w.apply(w.hub, programmaticProfile)
	for _, plane := range members {
		w.awaitDeployed(plane)
	}
	w.kubectl(w.hub, "delete", "sveltoscluster", "first", "-n", "edge", "--timeout=60s")
	w.wantNoAgent(members["first"])
	if err := w.wantMissing(members["first"], &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.awaitReady("edge", "second")
	w.kubectl(members["second"], "get", "configmap", "delivered")
}

// keptManifest waits until the hub keeps the manifest of a cluster, and returns it.
func (w *world) keptManifest(namespace, cluster string) string {
	w.t.Helper()
	var manifest []byte
	w.eventually("the hub keeps the manifest of "+cluster, func() error {
		encoded, err := w.try(w.hub, "kubectl", "get", "secret", cluster+"-sveltos-registration", "-n", namespace, "-o", `jsonpath={.data.manifest\.yaml}`)
		if err != nil {
			return err
		}
		if encoded == "" {
			return errors.New("the Secret has no manifest yet")
		}
		manifest, err = base64.StdEncoding.DecodeString(encoded)
		return err
	})
	return string(manifest)
}

// wantMissing returns an error unless an object does not exist.
func (w *world) wantMissing(plane *localkube.Plane, kind client.Object, name, namespace string) error {
	err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, kind)
	if err == nil {
		return fmt.Errorf("%T %s/%s exists", kind, namespace, name)
	}
	return client.IgnoreNotFound(err)
}

// wantNoAgent waits until a member has no object of the agent's manifest.
func (w *world) wantNoAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually("no object of the agent is left on "+plane.Name, func() error {
		out, err := w.try(plane, "kubectl", "get", "namespaces,clusterroles,clusterrolebindings,deployments,services,serviceaccounts,pods,secrets", "-A",
			"-l", "app.kubernetes.io/name=sveltos-applier", "-o", "name")
		if err != nil {
			return err
		}
		if left := strings.Fields(out); len(left) > 0 {
			return fmt.Errorf("objects still exist: %q", left)
		}
		return nil
	})
}
