package join_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/faults"
)

func eksRequest(namespace string, plane *localkube.Plane) join.WorkloadRequest {
	return join.WorkloadRequest{
		Request: join.Request{Namespace: namespace, Name: "c", Labels: map[string]string{"env": "test"}, Shard: "blue"}, CA: plane.Config.CAData,
		Identity: libv1beta1.WorkloadIdentity{
			Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: "https://127.0.0.1:1",
			AWS: &libv1beta1.AWSIdentity{ClusterName: "eks", RoleARN: "arn:aws:iam::123456789012:role/hub"},
		},
	}
}

func gkeRequest(namespace string) join.WorkloadRequest {
	return join.WorkloadRequest{Request: join.Request{Namespace: namespace, Name: "c"}, Identity: libv1beta1.WorkloadIdentity{
		Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: "34.1.2.3", GCP: &libv1beta1.GCPIdentity{ProjectID: "p", ClusterName: "g", Location: "l"},
	}}
}

func TestRegisterWorkloadMakesAClusterWithoutAKubeconfig(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	r := eksRequest(plane.Namespace(t, "eks"), plane)
	if err := join.RegisterWorkload(t.Context(), plane.Config, r); err != nil {
		t.Fatal(err)
	}
	again := join.WorkloadRequest{Request: join.Request{Namespace: r.Namespace, Name: "c", Labels: map[string]string{"tier": "two"}}}
	again.Identity = libv1beta1.WorkloadIdentity{
		Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: "https://127.0.0.1:2", AWS: &libv1beta1.AWSIdentity{ClusterName: "eks", Region: "us-west-2"},
	}
	if err := join.RegisterWorkload(t.Context(), plane.Config, again); err != nil {
		t.Fatal(err)
	}
	cluster := clusterNamed(t, hubClient, r.Namespace, "c")
	want := &libv1beta1.WorkloadIdentity{
		Provider: libv1beta1.WorkloadIdentityAWS, Endpoint: "https://127.0.0.1:2",
		CASecretRef: &corev1.SecretReference{Namespace: r.Namespace, Name: "c-sveltos-ca"},
		AWS:         &libv1beta1.AWSIdentity{ClusterName: "eks", RoleARN: "arn:aws:iam::123456789012:role/hub", Region: "us-west-2"},
	}
	if diff := cmp.Diff(want, cluster.Spec.WorkloadIdentity); diff != "" {
		t.Errorf("spec.workloadIdentity (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"env": "test", "tier": "two"}, cluster.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if shard := cluster.Annotations[libv1beta1.ShardAnnotation]; shard != "blue" || cluster.Spec.KubeconfigKeyName != "" {
		t.Errorf("shard is %q, spec is %+v", shard, cluster.Spec)
	}
	if diff := cmp.Diff(map[string][]byte{"ca.crt": plane.Config.CAData}, secretOf(t, hubClient, r.Namespace, "c-sveltos-ca").Data); diff != "" {
		t.Errorf("secret (-want +got):\n%s", diff)
	}
	wantText(t, join.RegisterWorkload(t.Context(), plane.Config, gkeRequest(r.Namespace)), "it is registered with a workload identity of AWS already; deregister it first")
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	wantText(t, join.RegisterPush(t.Context(), plane.Config, pushRequest(r.Namespace, kubeconfig)), "it is registered with a workload identity already; deregister it first")

	departure, err := join.Deregister(t.Context(), plane.Config, join.DeregisterRequest{Request: join.Request{Namespace: r.Namespace, Name: "c"}})
	if err != nil {
		t.Fatal(err)
	}
	var deleted []string
	for _, ref := range departure.Deleted {
		deleted = append(deleted, ref.Kind+"/"+ref.Name)
	}
	if diff := cmp.Diff([]string{"SveltosCluster/c", "Secret/c-sveltos-ca"}, deleted); diff != "" {
		t.Errorf("deleted (-want +got):\n%s", diff)
	}
	if left := inNamespace(t, hubClient, r.Namespace); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestRegisterWorkloadKeepsForeignObjects(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	kubeconfig, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	pulled, pushed, foreign := plane.Namespace(t, "pulled"), plane.Namespace(t, "pushed"), plane.Namespace(t, "foreign")
	registered(t, plane, pullRequest(pulled, "c"))
	if err := join.RegisterPush(t.Context(), plane.Config, pushRequest(pushed, kubeconfig)); err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: foreign, Name: "c-sveltos-ca"}, Data: map[string][]byte{"mine": nil}}
	if err := hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	for namespace, want := range map[string]string{
		pulled: "it is registered in pull mode already", pushed: "it is registered without a workload identity already", foreign: join.ErrForeign.Error(),
	} {
		before := inNamespace(t, hubClient, namespace)
		wantText(t, join.RegisterWorkload(t.Context(), plane.Config, eksRequest(namespace, plane)), want)
		if diff := cmp.Diff(before, inNamespace(t, hubClient, namespace)); diff != "" {
			t.Errorf("objects (-before +after):\n%s", diff)
		}
	}
	if kept := secretOf(t, hubClient, foreign, "c-sveltos-ca"); kept == nil || kept.UID != secret.UID || len(kept.Data) != 1 {
		t.Errorf("secret of somebody else: got %v", kept)
	}
}

func TestAFailureAtAnyStepOfRegisterWorkloadIsTakenBack(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	for kind, effect := range requestFaults {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			first := eksRequest("workload-"+kind, plane)
			attempt := func(r join.WorkloadRequest, at int64) (done bool) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				f := &faults.Fault{At: at, Effect: effect(cancel)}
				err := join.RegisterWorkload(ctx, f.On(plane.Config), r)
				if err == nil && f.Seen() >= at {
					t.Errorf("step %d: got no error", at)
				}
				return err == nil
			}
			steps := int64(1)
			for ; ; steps++ {
				// A namespace that goes takes no new objects for a while.
				first.Namespace = fmt.Sprintf("workload-%s-%d", kind, steps)
				if attempt(first, steps) {
					break
				}
				if left := leftBy(t, hubClient, first.Namespace); len(left) > 0 {
					t.Errorf("step %d: left: %v", steps, left)
				}
			}
			if steps != 4 {
				t.Errorf("a registration writes %d times, want a namespace, a Secret and a SveltosCluster", steps-1)
			}
			before := clusterNamed(t, hubClient, first.Namespace, "c")
			for at := int64(1); at < 3; at++ {
				again := eksRequest(first.Namespace, plane)
				again.Labels, again.Shard = map[string]string{"step": fmt.Sprint(at)}, "green"
				again.CA = append([]byte("# another\n"), plane.Config.CAData...)
				again.Identity.Endpoint, again.Identity.AWS.Region = "https://127.0.0.1:2", "us-west-2"
				if attempt(again, at) {
					t.Fatalf("step %d: got no error", at)
				}
				after := clusterNamed(t, hubClient, first.Namespace, "c")
				if diff := cmp.Diff(before.Spec, after.Spec); diff != "" || !maps.Equal(before.Labels, after.Labels) || !maps.Equal(before.Annotations, after.Annotations) {
					t.Errorf("step %d: labels %v, annotations %v, spec (-before +after):\n%s", at, after.Labels, after.Annotations, diff)
				}
				if secret := secretOf(t, hubClient, first.Namespace, "c-sveltos-ca"); string(secret.Data["ca.crt"]) != string(plane.Config.CAData) {
					t.Errorf("step %d: the authority is %q", at, secret.Data["ca.crt"])
				}
			}
		})
	}
}

func TestProviderAndItsPartBelongTogether(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	ns := plane.Namespace(t, "iff")
	type spec = libv1beta1.SveltosClusterSpec
	type workload = libv1beta1.WorkloadIdentity
	for name, test := range map[string]struct {
		spec spec
		want string
	}{
		"aws-without":     {spec{WorkloadIdentity: &workload{Provider: "AWS", Endpoint: "e"}}, "aws must be set if and only if provider is AWS"},
		"gcp-without":     {spec{WorkloadIdentity: &workload{Provider: "GCP", Endpoint: "e"}}, "gcp must be set if and only if provider is GCP"},
		"azure-without":   {spec{WorkloadIdentity: &workload{Provider: "Azure", Endpoint: "e"}}, "azure must be set if and only if provider is Azure"},
		"aws-and-another": {spec{WorkloadIdentity: &workload{Provider: "AWS", Endpoint: "e", AWS: &libv1beta1.AWSIdentity{}, GCP: &libv1beta1.GCPIdentity{}}}, "gcp must be set if and only if"},
		"no-endpoint":     {spec{WorkloadIdentity: &workload{Provider: "GCP", GCP: &libv1beta1.GCPIdentity{}}}, "endpoint"},
		"another":         {spec{WorkloadIdentity: &workload{Provider: "Other", Endpoint: "e"}}, "provider"},
		"and-kubeconfig": {
			spec{KubeconfigName: "k", WorkloadIdentity: &workload{Provider: "GCP", Endpoint: "e", GCP: &libv1beta1.GCPIdentity{}}},
			"workloadIdentity and kubeconfigName exclude each other",
		},
	} {
		cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}, Spec: test.spec}
		wantText(t, hubClient.Create(t.Context(), cluster, client.DryRunAll), test.want)
	}
}
