package register //nolint:testpackage // compares the manifest as text, without a control plane

import (
	"bytes"
	"flag"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/internal/kube"
)

var update = flag.Bool("update", false, "write the golden files")

func TestManifestGolden(t *testing.T) {
	t.Parallel()
	cases := map[string]Request{
		"plain": {ClusterName: "member3", Namespace: DefaultNamespace, ClusterNamespace: "karmada-cluster", Image: "towline:latest", Replicas: 1, EnableCertRotation: true},
		"full": {
			ClusterName: "member3", Namespace: "agents", ClusterNamespace: "elsewhere", Image: "registry.example.com/towline:v1", Replicas: 2,
			Provider: "aws", Region: "eu-central-1", Zones: []string{"a", "b"}, ProxyServerAddress: "http://proxy.example.com:3128",
		},
	}
	for name, request := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			way, err := encodeKubeconfig(request.ClusterName, "10.10.0.1:32443", []byte("ca"), []byte("certificate"), []byte("key"))
			if err != nil {
				t.Fatal(err)
			}
			input := manifestInput{request: request, attempt: "attempt", memberServer: "https://10.20.0.1:6443", csr: "member3-abcde", kubeconfig: way}
			objects, err := input.objects()
			if err != nil {
				t.Fatal(err)
			}
			for _, obj := range objects[1:] {
				obj.SetOwnerReferences([]metav1.OwnerReference{{Name: "owner"}})
			}
			got := slices.Concat(way, encode(t, input.namespace(), objects[1], objects[0], objects[2], objects[3], objects[4]))
			file := "testdata/" + name + ".yaml"
			if *update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("manifest (-want +got):\n%s", diff)
			}
		})
	}
}

func encode(t *testing.T, objects ...client.Object) []byte {
	t.Helper()
	var out bytes.Buffer
	for _, obj := range objects {
		desired, err := kube.ToUnstructured(kube.Scheme(), obj)
		if err != nil {
			t.Fatal(err)
		}
		text, err := yaml.Marshal(desired.Object)
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString("---\n")
		out.Write(text)
	}
	return out.Bytes()
}
