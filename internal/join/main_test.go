package join_test

import (
	"bytes"
	"context"
	"io/fs"
	"slices"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/api/crds"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
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
	shared.once.Do(func() { shared.err = install(hubClient) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return plane, hubClient
}

func install(hubClient client.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	files, err := fs.Glob(crds.FS, "*.yaml")
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := fs.ReadFile(crds.FS, file)
		if err != nil {
			return err
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(text, crd); err != nil {
			return err
		}
		if err := hubClient.Create(ctx, crd); err != nil {
			return err
		}
	}
	lists := []client.ObjectList{
		&libv1beta1.SveltosClusterList{}, &libv1beta1.ConfigurationGroupList{}, &libv1beta1.ConfigurationBundleList{}, &configv1beta1.ClusterSummaryList{},
	}
	return wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		return !slices.ContainsFunc(lists, func(list client.ObjectList) bool { return hubClient.List(ctx, list) != nil }), nil
	})
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
