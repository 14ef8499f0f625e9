package stories

import (
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// isolationProfile delivers content that may be shared, and a Secret, which may not, to each member.
const isolationProfile = `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: for-all}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: shared}
---
apiVersion: v1
kind: Secret
metadata: {namespace: default, name: for-each}
type: addons.projectsveltos.io/cluster-profile
stringData:
  objects.yaml: |
    apiVersion: v1
    kind: Secret
    metadata: {namespace: default, name: private}
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: isolation}
spec:
  clusterSelector: {matchLabels: {env: isolation}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: for-all}
  - {kind: Secret, namespace: default, name: for-each}
`

// insider is an agent whose credential an attacker has.
type insider struct {
	namespace string
	cluster   string
	// delivery is the hub namespace with its groups and bundles.
	delivery string
	// config has the agent's credential for the hub, as it is on the member.
	config *rest.Config
	plane  *localkube.Plane
}

// TestIsolation tries the credential of each of four agents, two of them in the same hub namespace, on all resources of
// the hub. The agents are stopped before, so that each change on the hub is made by an attack.
func TestIsolation(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	insiders := w.insiders(
		insider{namespace: "shared", cluster: "alpha"}, insider{namespace: "shared", cluster: "beta"},
		insider{namespace: "west", cluster: "gamma"}, insider{namespace: "east", cluster: "delta"},
	)
	if one, other := insiders[0].delivery, insiders[1].delivery; one == other {
		t.Fatalf("two agents share the delivery namespace %s", one)
	}
	w.stopAgents(insiders)
	// The hub deletes content that the agents have applied, and delivers nothing to clusters that are Down. So the content
	// is delivered now.
	w.apply(w.hub, isolationProfile)
	w.eventually("the hub has content of each agent", func() error { return w.wantContent(insiders) })

	allowed := documented(t)
	surface := w.surface()
	for _, a := range insiders[:3] { // the fourth is in the same position as the third
		w.wantAllowed(a, surface, allowed)
	}
	for _, a := range insiders {
		for _, b := range insiders {
			if a.cluster != b.cluster {
				w.attack(a, b, allowed)
			}
		}
		w.wantSharedByNameOnly(a)
	}
}

// insiders registers members and reads the credentials of their agents.
func (w *world) insiders(insiders ...insider) []insider {
	w.t.Helper()
	var names []string
	for _, i := range insiders {
		names = append(names, i.cluster)
	}
	planes := localkube.SeveralForTest(w.t, names, localkube.WithExec(join.DefaultAgentImage, w.binary("towline-agent")))
	manifests := map[string]string{}
	for n, i := range insiders {
		manifests[i.cluster] = w.run(w.hub, "sveltosctl", "register", "cluster",
			"--namespace="+i.namespace, "--cluster="+i.cluster, "--pullmode", "--labels=env=isolation")
		w.apply(planes[n], manifests[i.cluster])
	}
	for n := range insiders {
		i := &insiders[n]
		i.plane = planes[n]
		w.awaitReady(i.namespace, i.cluster)
		w.eventually("the agent of "+i.cluster+" exchanges its token", func() error { return w.readAgentCredential(i, manifests[i.cluster]) })
	}
	return insiders
}

// stopAgents stops the agents of members, all at once.
func (w *world) stopAgents(insiders []insider) {
	w.t.Helper()
	for _, i := range insiders {
		w.kubectl(i.plane, "scale", "deployment", "sveltos-applier-manager", "-n", kube.AgentNamespace, "--replicas=0")
	}
	for _, i := range insiders {
		w.eventually("the agent of "+i.cluster+" stops", func() error {
			out, err := w.try(i.plane, "kubectl", "get", "pods", "-n", kube.AgentNamespace, "-o", "name")
			if err == nil && out != "" {
				err = fmt.Errorf("pods still exist: %s", out)
			}
			return err
		})
	}
}

// readAgentCredential reads the agent's kubeconfig from its member, once it differs from the kubeconfig in the
// manifest.
func (w *world) readAgentCredential(i *insider, manifest string) error {
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret(i.cluster)}
	if err := w.client(i.plane).Get(w.t.Context(), key, secret); err != nil {
		return err
	}
	kubeconfig := secret.Data[join.KubeconfigKey]
	if strings.Contains(manifest, base64.StdEncoding.EncodeToString(kubeconfig)) {
		return errors.New("it is the kubeconfig of the manifest")
	}
	loaded, err := clientcmd.NewClientConfigFromBytes(kubeconfig)
	if err != nil {
		return err
	}
	if i.config, err = loaded.ClientConfig(); err != nil {
		return err
	}
	i.config.QPS = -1
	i.delivery, _, err = loaded.Namespace()
	return err
}

// wantContent returns an error until every delivery namespace has a group and a bundle, and the shared namespace has a
// bundle.
func (w *world) wantContent(insiders []insider) error {
	namespaces := []string{kube.AgentNamespace}
	for _, i := range insiders {
		namespaces = append(namespaces, i.delivery)
	}
	for n, namespace := range namespaces {
		var groups libv1beta1.ConfigurationGroupList
		var bundles libv1beta1.ConfigurationBundleList
		hub := w.client(w.hub)
		err := errors.Join(
			hub.List(w.t.Context(), &groups, client.InNamespace(namespace)), hub.List(w.t.Context(), &bundles, client.InNamespace(namespace)))
		if err != nil {
			return err
		}
		if len(bundles.Items) == 0 || n > 0 && len(groups.Items) == 0 {
			return fmt.Errorf("%s has %d groups and %d bundles", namespace, len(groups.Items), len(bundles.Items))
		}
	}
	return nil
}

// wantSharedByNameOnly checks that an agent can read shared content by name, and cannot list it; and that no shared
// content came from a Secret.
func (w *world) wantSharedByNameOnly(a insider) {
	w.t.Helper()
	var bundles libv1beta1.ConfigurationBundleList
	if err := w.client(w.hub).List(w.t.Context(), &bundles, client.InNamespace(kube.AgentNamespace)); err != nil {
		w.t.Fatal(err)
	}
	shared := dynamic.NewForConfigOrDie(a.config).Resource(libv1beta1.GroupVersion.WithResource("configurationbundles")).Namespace(kube.AgentNamespace)
	for _, bundle := range bundles.Items {
		if _, err := shared.Get(w.t.Context(), bundle.Name, metav1.GetOptions{}); err != nil {
			w.t.Errorf("%s cannot read a shared bundle by name: %v", a.cluster, err)
		}
		if bundle.Spec.ReferencedObjectKind == "Secret" {
			w.t.Errorf("the shared bundle %s came from Secret %s/%s", bundle.Name, bundle.Spec.ReferencedObjectNamespace, bundle.Spec.ReferencedObjectName)
		}
	}
	if _, err := shared.Get(w.t.Context(), "config-00000000000000000000", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		w.t.Errorf("%s requests a shared bundle that does not exist: got %v, want not found", a.cluster, err)
	}
	_, listErr := shared.List(w.t.Context(), metav1.ListOptions{})
	_, watchErr := shared.Watch(w.t.Context(), metav1.ListOptions{})
	for verb, err := range map[string]error{"list": listErr, "watch": watchErr} {
		if !isRefused(err) {
			w.t.Errorf("%s may %s shared bundles: %v", a.cluster, verb, err)
		}
	}
}

// isRefused returns whether the hub refused a request because of its credential.
func isRefused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) }
