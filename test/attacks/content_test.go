package attacks

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/deliver"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// secretText is the text of a Secret that the attackers want to read.
const secretText = "canary-in-a-secret"

// resource is a kind that can be listed in a namespace.
type resource struct {
	plural string
	kind   schema.GroupVersionKind
}

// readableResources returns all namespaced kinds that can be listed, except for Secrets.
func (w *world) readableResources() []resource {
	w.Helper()
	lists, err := discovery.NewDiscoveryClientForConfigOrDie(w.hub.Config).ServerPreferredNamespacedResources()
	w.noError(err)
	var all []resource
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		w.noError(err)
		for _, r := range list.APIResources {
			if strings.Contains(strings.Join(r.Verbs, " "), "list") && (version.Group != "" || r.Name != "secrets") {
				all = append(all, resource{r.Name, version.WithKind(r.Kind)})
			}
		}
	}
	return all
}

// findText lists all objects in the namespaces, and returns the objects with the text, as kind/name.
func (w *world) findText(attacker client.Client, resources []resource, text string, namespaces ...string) (found []string) {
	w.Helper()
	for _, r := range resources {
		for _, namespace := range namespaces {
			list := &unstructured.UnstructuredList{}
			list.SetGroupVersionKind(r.kind.GroupVersion().WithKind(r.kind.Kind + "List"))
			w.noError(attacker.List(w.Context(), list, client.InNamespace(namespace)))
			for _, item := range list.Items {
				if contains(w, item.Object, text) {
					found = append(found, r.kind.Kind+"/"+item.GetName())
				}
			}
		}
	}
	return found
}

// contains returns whether a value has the text, also in base64 or compressed.
func contains(w *world, value any, text string) bool {
	switch value := value.(type) {
	case map[string]any:
		for key, field := range value {
			if strings.Contains(key, text) || contains(w, field, text) {
				return true
			}
		}
	case []any:
		for _, field := range value {
			if contains(w, field, text) {
				return true
			}
		}
	case string:
		decoded, err := base64.StdEncoding.DecodeString(value)
		if err != nil {
			return strings.Contains(value, text)
		}
		decoder, err := zstd.NewReader(nil)
		w.noError(err)
		defer decoder.Close()
		stream, _ := decoder.DecodeAll(decoded, nil) // most values are not compressed
		return bytes.Contains(bytes.Join([][]byte{[]byte(value), decoded, stream}, nil), []byte(text))
	}
	return false
}

// deploySecret writes a Secret, and a Profile that deploys it to the clusters of the test. Its objects are a Secret and
// a ConfigMap.
func (w *world) deploySecret(tenant client.Client) {
	w.Helper()
	w.noError(w.Create(w.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "content"}, Type: libv1beta1.ProfileSecretType,
		StringData: map[string]string{"objects.yaml": `
apiVersion: v1
kind: Secret
metadata: {namespace: default, name: login}
stringData: {password: ` + secretText + `}
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: from-a-secret}
data: {token: ` + secretText + `}
`},
	}))
	w.createProfile(tenant, "deploys", func(spec *configv1beta1.ProfileSpec) {
		spec.PolicyRefs = []libv1beta1.PolicyRef{{Kind: "Secret", Namespace: w.ns, Name: "content"}}
	})
}

// deployContentWithSecrets writes Secrets, and Profiles that use them in templates, values and patches. It returns the
// texts of the Secrets by their use. The text in the values of a release is in no object.
func (w *world) deployContentWithSecrets(tenant client.Client) map[string]string {
	w.Helper()
	texts := map[string]string{}
	secret := func(name, key, format string, uses ...string) {
		var args []any
		for _, use := range uses {
			texts[use] = "canary-for-" + use
			args = append(args, texts[use])
		}
		w.noError(w.Create(w.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Type: libv1beta1.ProfileSecretType,
			StringData: map[string]string{key: fmt.Sprintf(format, args...)},
		}))
	}
	secret("values", "values.yaml", "token: %s\nunused: %s\n", "chart", "release")
	secret("resource", "token", "%s", "template")
	secret("build-values", "token", "%s", "kustomization")
	secret("patch", "patch", "target: {kind: ConfigMap}\npatch: |\n  - {op: add, path: /data/token, value: %s}\n", "patch")
	configMap := func(name string, isTemplate bool, data map[string]string) {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}, Data: data}
		if isTemplate {
			metav1.SetMetaDataAnnotation(&object.ObjectMeta, libv1beta1.TemplateAnnotation, "ok")
		}
		w.noError(tenant.Create(w.Context(), object))
	}
	object := func(name, token string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %s}\ndata: {token: '%s'}\n", name, token)
	}
	configMap("template", true, map[string]string{"a.yaml": object("from-a-template", `{{ (getResource "login").data.token | b64dec }}`)})
	configMap("build", false, map[string]string{"kustomization.yaml": "resources: [a.yaml]\n", "a.yaml": object("from-a-kustomization", "{{ .token }}")})
	configMap("plain", false, map[string]string{"a.yaml": object("patched", "")})
	charts, err := examples.Repository(examples.Chart{Name: "leak", Version: "1.0.0", Files: map[string]string{"templates/leak.yaml": object("from-a-chart", "{{ .Values.token }}")}})
	w.noError(err)
	repository := httptest.NewServer(charts)
	w.Cleanup(repository.Close)
	from := func(secret string) []configv1beta1.ValueFrom {
		return []configv1beta1.ValueFrom{{Kind: configv1beta1.ValueFromSecret, Name: secret}}
	}
	policy := func(name string) []libv1beta1.PolicyRef {
		return []libv1beta1.PolicyRef{{Kind: "ConfigMap", Name: name}}
	}
	for name, change := range map[string]func(*configv1beta1.ProfileSpec){
		"by-chart": func(spec *configv1beta1.ProfileSpec) {
			spec.HelmCharts = []configv1beta1.HelmChart{{
				RepositoryURL: repository.URL, RepositoryName: "r", ChartName: "r/leak", ChartVersion: "1.0.0", ReleaseNamespace: "leak", ValuesFrom: from("values"),
			}}
		},
		"by-template": func(spec *configv1beta1.ProfileSpec) {
			spec.PolicyRefs = policy("template")
			spec.TemplateResourceRefs = []configv1beta1.TemplateResourceRef{{
				Resource: corev1.ObjectReference{APIVersion: "v1", Kind: "Secret", Name: "resource"}, Identifier: "login",
			}}
		},
		"by-kustomization": func(spec *configv1beta1.ProfileSpec) {
			spec.KustomizationRefs = []configv1beta1.KustomizationRef{{Kind: "ConfigMap", Name: "build", ValuesFrom: from("build-values")}}
		},
		"by-patch": func(spec *configv1beta1.ProfileSpec) {
			spec.PolicyRefs, spec.PatchesFrom = policy("plain"), from("patch")
		},
	} {
		w.createProfile(tenant, name, change)
	}
	return texts
}

// awaitContent fetches the deliveries of a cluster like its agent, until their content has all texts.
func (w *world) awaitContent(m fleet.Member, texts map[string]string) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), waitTimeout)
	defer cancel()
	hubClient, err := client.NewWithWatch(w.hub.Config, client.Options{Scheme: kube.Scheme()})
	w.noError(err)
	agent := deliver.NewAgentSource(hubClient, m.DeliveryNamespace, m.Name)
	var mu sync.Mutex // guards missing
	missing := maps.Clone(texts)
	err = agent.Run(ctx, 1, func(ctx context.Context, d deliver.Delivery) error {
		fetched, err := agent.Fetch(ctx, d)
		if err != nil {
			return err
		}
		raw, err := json.Marshal(fetched)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		maps.DeleteFunc(missing, func(_, text string) bool { return bytes.Contains(raw, []byte(text)) })
		if len(missing) == 0 {
			cancel()
		}
		return nil
	})
	mu.Lock()
	defer mu.Unlock()
	if len(missing) > 0 {
		w.Fatalf("%s: these Secrets are not delivered: %v (%v)", m.Name, missing, err)
	}
}

// awaitBundles waits for the deliveries in a namespace, and returns their content.
func (w *world) awaitBundles(namespace string) []libv1beta1.ConfigurationBundle {
	w.Helper()
	list := &libv1beta1.ConfigurationBundleList{}
	w.eventually("deliveries in "+namespace, func() error {
		groups := &libv1beta1.ConfigurationGroupList{}
		if err := errors.Join(w.List(w.Context(), list, client.InNamespace(namespace)), w.List(w.Context(), groups, client.InNamespace(namespace))); err != nil {
			return err
		}
		if len(list.Items) == 0 || len(groups.Items) == 0 {
			return fmt.Errorf("%d groups and %d objects with content", len(groups.Items), len(list.Items))
		}
		return nil
	})
	return list.Items
}

// TestSecretsInCustomResources: a user who may read everything in a namespace except Secrets looks for the content of
// Secrets that are delivered to two clusters: as manifests, in values, by templates and in patches.
func TestSecretsInCustomResources(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.deploySecret(tenant)
	texts := w.deployContentWithSecrets(tenant)
	texts["manifest"] = secretText
	namespaces := []string{kube.AgentNamespace} // shared content
	for _, name := range []string{"one", "two"} {
		m := fleet.FromSveltosCluster(w.pullCluster(tenant, name))
		w.awaitContent(m, texts)
		namespaces = append(namespaces, m.DeliveryNamespace)
	}
	resources := w.readableResources()
	viewer := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-viewer"}}
	for _, r := range resources {
		viewer.Rules = append(viewer.Rules, rbacv1.PolicyRule{APIGroups: []string{r.kind.Group}, Resources: []string{r.plural}, Verbs: []string{"get", "list", "watch"}})
	}
	w.noError(w.Create(w.Context(), viewer))
	role := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: viewer.Name}
	attacker := w.accountWithBinding("viewer", &rbacv1.RoleBinding{RoleRef: role})
	for _, namespace := range namespaces {
		if namespace == w.ns {
			continue
		}
		w.noError(w.Create(w.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: w.ns + "-viewer"}, RoleRef: role,
			Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: w.ns, Name: "viewer"}},
		}))
	}
	for use, text := range texts {
		if found := w.findText(attacker, resources, text, namespaces...); len(found) > 0 {
			t.Errorf("a user without rights on Secrets finds the content of the Secret for the %s in %v", use, found)
		}
	}
	// The user finds content that is not encrypted.
	encoder, err := zstd.NewWriter(nil)
	w.noError(err)
	plain := &libv1beta1.ConfigurationBundle{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: "plain"}}
	plain.Spec.Payload = encoder.EncodeAll([]byte(secretText), nil)
	w.noError(w.Create(w.Context(), plain))
	if found := w.findText(attacker, resources, secretText, namespaces...); len(found) != 1 {
		t.Errorf("the search finds %v, want the content that is not encrypted", found)
	}
}

// TestKeysOfOtherClusters: the agents of two clusters in one namespace try to read each other's content, its keys, and
// the Secrets of the tenant. The first one has its deliveries in the namespace of the tenant.
func TestKeysOfOtherClusters(t *testing.T) {
	w := newWorld(t)
	tenant := w.tenant()
	w.deploySecret(tenant)
	var members []fleet.Member
	for _, name := range []string{"one", "two"} {
		m := fleet.FromSveltosCluster(w.pullCluster(tenant, name))
		w.awaitBundles(m.DeliveryNamespace)
		members = append(members, m)
	}
	for i, m := range members {
		agent := w.agentClient(m)
		own := client.ObjectKey{Namespace: m.DeliveryNamespace, Name: fleet.ContentKeySecret(m.Name)}
		w.eventually("the agent of "+m.Name+" reads its key", func() error { return agent.Get(w.Context(), own, &corev1.Secret{}) })
		other := members[1-i].DeliveryNamespace
		for _, bundle := range w.awaitBundles(other) {
			if err := agent.Get(w.Context(), client.ObjectKeyFromObject(&bundle), &libv1beta1.ConfigurationBundle{}); !apierrors.IsForbidden(err) {
				t.Errorf("agent %s reads content of the other cluster: %v", m.Name, err)
			}
		}
		for _, namespace := range []string{m.DeliveryNamespace, other} {
			if err := agent.List(w.Context(), &corev1.SecretList{}, client.InNamespace(namespace)); !apierrors.IsForbidden(err) {
				t.Errorf("agent %s lists the Secrets in %s: %v", m.Name, namespace, err)
			}
			secrets := &corev1.SecretList{}
			w.noError(w.List(w.Context(), secrets, client.InNamespace(namespace)))
			for _, secret := range secrets.Items {
				err := agent.Get(w.Context(), client.ObjectKeyFromObject(&secret), &corev1.Secret{})
				if client.ObjectKeyFromObject(&secret) != own && !apierrors.IsForbidden(err) {
					t.Errorf("agent %s reads Secret %s/%s: %v", m.Name, secret.Namespace, secret.Name, err)
				}
			}
			if !strings.Contains(fmt.Sprint(secrets.Items), "sveltos-content-key") {
				t.Errorf("there is no key in %s", namespace)
			}
		}
	}
}
