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

// TestProgrammaticRegistration registers two clusters with nothing but kubectl apply of a SveltosCluster on the hub and
// of the manifest that the hub keeps on the member, and takes them out of the fleet with nothing but kubectl delete.
func TestProgrammaticRegistration(t *testing.T) {
	awaitTurn(t)
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
		w.ready("edge", name)
		w.eventually("the manifest of "+name+" is kept no longer than it is needed", func() error {
			return w.absent(w.hub, &corev1.Secret{}, name+"-sveltos-registration", "edge")
		})
	}
	w.apply(w.hub, programmaticProfile)
	for _, plane := range members {
		w.has(plane)
	}
	w.kubectl(w.hub, "delete", "sveltoscluster", "first", "-n", "edge", "--timeout=60s")
	w.wantNoAgent(members["first"])
	if err := w.absent(members["first"], &corev1.ConfigMap{}, "delivered", "default"); err != nil {
		t.Error(err)
	}
	w.ready("edge", "second")
	w.kubectl(members["second"], "get", "configmap", "delivered")
}

// keptManifest returns the manifest of a cluster that the hub keeps.
func (w *world) keptManifest(namespace, cluster string) string {
	w.t.Helper()
	var manifest []byte
	w.eventually("the hub keeps the manifest of "+cluster, func() error {
		encoded, err := w.try(w.hub, "kubectl", "get", "secret", cluster+"-sveltos-registration", "-n", namespace, "-o", `jsonpath={.data.manifest\.yaml}`)
		if err != nil {
			return err
		}
		if encoded == "" {
			return errors.New("there is no manifest in it yet")
		}
		manifest, err = base64.StdEncoding.DecodeString(encoded)
		return err
	})
	return string(manifest)
}

// absent says what is wrong unless an object is not there.
func (w *world) absent(plane *localkube.Plane, kind client.Object, name, namespace string) error {
	err := w.client(plane).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, kind)
	if err == nil {
		return fmt.Errorf("%T %s/%s is there", kind, namespace, name)
	}
	return client.IgnoreNotFound(err)
}

// wantNoAgent waits until nothing is left on a member of what the manifest put there.
func (w *world) wantNoAgent(plane *localkube.Plane) {
	w.t.Helper()
	w.eventually("nothing of the agent is left on "+plane.Name, func() error {
		out, err := w.try(plane, "kubectl", "get", "namespaces,clusterroles,clusterrolebindings,deployments,services,serviceaccounts,pods,secrets", "-A",
			"-l", "app.kubernetes.io/name=sveltos-applier", "-o", "name")
		if err != nil {
			return err
		}
		if left := strings.Fields(out); len(left) > 0 {
			return fmt.Errorf("left: %q", left)
		}
		return nil
	})
}
