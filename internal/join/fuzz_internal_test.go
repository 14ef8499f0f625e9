package join

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/test/fuzzing"
)

// FuzzMinifyKubeconfig reads kubeconfigs with several contexts. The result has the current context alone.
func FuzzMinifyKubeconfig(f *testing.F) {
	const kubeconfig = `{current-context: c, contexts: [{name: c, context: {cluster: a, user: u}}, {name: d, context: {cluster: b, user: v}}],
clusters: [{name: a, cluster: {server: "https://a"}}, {name: b, cluster: {server: "https://b", certificate-authority: /etc/x}}],
users: [{name: u, user: {token: t0ken-of-the-user}}, {name: v, user: {exec: {command: sh, apiVersion: client.authentication.k8s.io/v1}}}]}`
	f.Add([]byte(kubeconfig))
	f.Add([]byte(strings.Replace(kubeconfig, "current-context: c", "current-context: d", 1)))
	f.Add([]byte(strings.Replace(kubeconfig, "user: u}", "user: v}", 1)))
	f.Fuzz(func(t *testing.T, raw []byte) {
		config, minified, err := parseKubeconfig(raw)
		fuzzing.OneLine(t, err)
		const token = "t0ken-of-the-user"
		if read, loadErr := clientcmd.Load(raw); loadErr != nil || !strings.Contains(read.CurrentContext, token) { // errors have this name
			fuzzing.HidesSecret(t, err, raw, token)
		}
		if err != nil {
			return
		}
		loaded, err := clientcmd.Load(minified)
		if err != nil {
			t.Fatal(err)
		}
		if len(loaded.Contexts) != 1 || len(loaded.Clusters) > 1 || len(loaded.AuthInfos) > 1 {
			t.Errorf("more than the current context: %s", minified)
		}
		if config.ExecProvider != nil || config.AuthProvider != nil || config.CAFile != "" || config.CertFile != "" || config.KeyFile != "" || config.BearerTokenFile != "" {
			t.Errorf("it refers to a program or a file: %s", minified)
		}
	})
}

// FuzzReadServiceAccountToken reads the claims of tokens that are not verified.
func FuzzReadServiceAccountToken(f *testing.F) {
	f.Add("e30.eyJpYXQiOjEsImV4cCI6Miwia3ViZXJuZXRlcy5pbyI6eyJzZWNyZXQiOnsidWlkIjoiYSJ9fX0.c2ln")
	f.Add("e30.eyJpYXQiOjkyMjMzNzIwMzY4NTQ3NzU4MDcsImV4cCI6LTF9.")
	f.Add("a.b.c")
	f.Fuzz(func(t *testing.T, text string) {
		read := ReadToken(text)
		if read.Text != text {
			t.Errorf("the token %q became %q", text, read.Text)
		}
		if !read.Expires.IsZero() && !read.Issued.Before(read.Expires) {
			t.Errorf("issued %s and expires %s", read.Issued, read.Expires)
		}
	})
}

// FuzzAgentOptions reads the annotation with the options of an agent.
func FuzzAgentOptions(f *testing.F) {
	f.Add(`{"image":"a/b:c","imagePullSecrets":["a"],"proxyURL":"http://proxy:1","hubURL":"https://hub","requests":{"cpu":"1"},"limits":{"memory":"1Gi"},"tokenLifetime":"24h"}`)
	f.Add(`{"proxyURL":"http://me:pa55w0rd-of-proxy@proxy"}`)
	f.Add(`{"hubURL":"http://hub"}{}`)
	f.Add(`{"unknown":1}`)
	f.Add(`{"requests":{"cpu":"-1"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		options, err := ParseAgentOptions(text)
		fuzzing.OneLine(t, err)
		if !strings.Contains(fmt.Sprint(err), "unknown field") { // which may have any name
			fuzzing.HidesSecret(t, err, []byte(text), "pa55w0rd-of-proxy")
		}
		if err != nil {
			return
		}
		for _, address := range []string{options.HubURL, options.ProxyURL} {
			if parsed, err := url.Parse(address); err != nil || parsed.User != nil || address != "" && parsed.Host == "" {
				t.Errorf("%q is accepted", address)
			}
		}
		encoded, err := options.Encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseAgentOptions(encoded)
		if err != nil {
			t.Fatalf("%q: %v", encoded, err)
		}
		if diff := cmp.Diff(options, again, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("other options after encoding and decoding (-first +second):\n%s", diff)
		}
	})
}

// FuzzAgentPatch applies patches to an agent's manifest. The objects keep their identity.
func FuzzAgentPatch(f *testing.F) {
	for _, text := range []string{
		"spec: {template: {spec: {containers: [{name: agent, resources: {limits: {cpu: 1}}}]}}}", "- {op: add, path: /metadata/labels, value: {a: b}}",
		"patch: |\n  - {op: copy, from: /spec, path: /spec/template/x}\ntarget: {kind: Deployment, name: a.*}", "{patch: 'metadata: {name: b}', target: {kind: ServiceAccount}}",
		"apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: agent, namespace: projectsveltos, $patch: delete}", "$patch: replace\nmetadata: {}", "---\na: b\n---\nc: d\n", "- {op: remove, path: ''}",
		"{patch: '{}', target: {labelSelector: 'a in (', kind: '('}}", "- {op: replace, path: /metadata/name, value: x}",
	} {
		f.Add(text)
	}
	const manifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: agent, namespace: projectsveltos, labels: {app: agent}}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec: {containers: [{name: agent, image: a, args: [b]}]}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: agent, namespace: projectsveltos}
`
	f.Fuzz(func(t *testing.T, text string) {
		objects, err := kube.DecodeManifest([]byte(manifest))
		if err != nil {
			t.Fatal(err)
		}
		before := refsOf(objects)
		fuzzing.Within(t, 128<<20+uint64(len(text))*20_000, func() {
			var parsed patch
			if parsed, err = parsePatch("ConfigMap a/b, key c", text); err == nil {
				err = parsed.applyTo(objects)
			}
		})
		fuzzing.OneLine(t, err)
		if err != nil {
			return
		}
		if after := refsOf(objects); !cmp.Equal(before, after) {
			t.Errorf("the objects are %v, want %v", after, before)
		}
	})
}

func refsOf(objects []*unstructured.Unstructured) []string {
	var refs []string
	for _, object := range objects {
		refs = append(refs, kube.RefOf(object).String())
	}
	return refs
}

// FuzzPatchesReference reads the annotation that names a ConfigMap with patches.
func FuzzPatchesReference(f *testing.F) {
	f.Add("a/b")
	f.Add("a/b/c")
	f.Add("../a")
	f.Fuzz(func(t *testing.T, text string) {
		key, err := ParsePatchesReference(text)
		fuzzing.OneLine(t, err)
		if err == nil && key.String() != text {
			t.Errorf("%q became %s", text, key)
		}
		if err == nil && validateLabel("namespace", key.Namespace) != nil {
			t.Errorf("namespace %q is accepted", key.Namespace)
		}
	})
}
