package credentials_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// setUp installs our CRDs once on the control plane that the tests share.
type setUp struct {
	once sync.Once
	err  error
}

var shared setUp

// hub is the shared control plane with our CRDs, and an administrator's client for it.
func hub(t *testing.T) (*localkube.Plane, client.Client) {
	t.Helper()
	plane := localkube.Shared(t)
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	shared.once.Do(func() { shared.err = crds.Install(context.Background(), hubClient) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return plane, hubClient
}

// document is one document of a manifest.
type document = map[string]any

func documents(t *testing.T, manifest []byte) []document {
	t.Helper()
	var docs []document
	for part := range bytes.SplitSeq(manifest, []byte("---\n")) {
		var doc document
		if err := yaml.Unmarshal(part, &doc); err != nil {
			t.Fatal(err)
		}
		docs = append(docs, doc)
	}
	return docs
}

// agentConfig returns the configuration that the manifest gives to the agent, and the delivery namespace.
func agentConfig(t *testing.T, manifest []byte) (config *rest.Config, delivery string) {
	t.Helper()
	docs := documents(t, manifest)
	var secret struct {
		Data map[string][]byte `json:"data"`
	}
	raw, err := yaml.Marshal(docs[len(docs)-1])
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(raw, &secret); err != nil {
		t.Fatal(err)
	}
	loaded, err := clientcmd.NewClientConfigFromBytes(secret.Data[join.KubeconfigKey])
	if err != nil {
		t.Fatal(err)
	}
	if config, err = loaded.ClientConfig(); err != nil {
		t.Fatal(err)
	}
	if delivery, _, err = loaded.Namespace(); err != nil {
		t.Fatal(err)
	}
	return config, delivery
}

func pullRequest(namespace, name string) join.PullRequest {
	return join.PullRequest{Request: join.Request{Namespace: namespace, Name: name}, Version: "v1.2.3"}
}

// registered registers a pull-mode cluster and returns its manifest.
func registered(t *testing.T, plane *localkube.Plane, r join.PullRequest) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := join.RegisterPull(t.Context(), plane.Config, r, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func wantText(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got error %v, want one that contains %q", err, text)
	}
}

// failing is an output on which every write fails.
type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func decode(t *testing.T, text string) []byte {
	t.Helper()
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// put writes kubeconfig as `kubectl apply` of a manifest does.
func put(t *testing.T, o credentials.Options, kubeconfig []byte) {
	t.Helper()
	secret, err := o.Secrets.Get(t.Context(), o.Secret, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	secret.Data[join.KubeconfigKey] = kubeconfig
	if _, err := o.Secrets.Update(t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func secretNamed(namespace, name string) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
}

func secretOf(t *testing.T, hubClient client.Client, namespace, name string) *corev1.Secret {
	t.Helper()
	secret := &corev1.Secret{}
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, secret); err != nil {
		t.Fatal(err)
	}
	return secret
}

// eventually fails the test if check does not return true within 30 seconds.
func eventually(t *testing.T, what string, check func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		return check(), nil
	})
	if err != nil {
		t.Fatalf("wait until %s: %v", what, err)
	}
}
