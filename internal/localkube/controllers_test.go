package localkube_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/towline/towline/internal/localkube"
)

// podTemplate is a pod that does nothing.
func podTemplate() corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "example.com/web:v1"}}},
	}
}

func TestWorkloadsBecomeReady(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	client, namespace := clientOf(p), p.Namespace(t, "workloads")
	createWorkloads(t, client, namespace)
	checks := map[string]func(context.Context) (bool, error){
		"deployment is available": func(ctx context.Context) (bool, error) {
			have, err := client.AppsV1().Deployments(namespace).Get(ctx, "web", metav1.GetOptions{})
			return err == nil && have.Status.AvailableReplicas == 2, err
		},
		"daemon set is available": func(ctx context.Context) (bool, error) {
			have, err := client.AppsV1().DaemonSets(namespace).Get(ctx, "web", metav1.GetOptions{})
			return err == nil && have.Status.NumberAvailable == 1, err
		},
		"stateful set is available": func(ctx context.Context) (bool, error) {
			have, err := client.AppsV1().StatefulSets(namespace).Get(ctx, "web", metav1.GetOptions{})
			return err == nil && have.Status.AvailableReplicas == 2, err
		},
		"job is complete": func(ctx context.Context) (bool, error) {
			have, err := client.BatchV1().Jobs(namespace).Get(ctx, "web", metav1.GetOptions{})
			return err == nil && have.Status.CompletionTime != nil, err
		},
		"service has endpoints": func(ctx context.Context) (bool, error) {
			slices, err := client.DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
			if err != nil || len(slices.Items) == 0 {
				return false, err
			}
			return len(slices.Items[0].Endpoints) >= 4, nil
		},
	}
	for what, check := range checks {
		eventually(t, what, func(ctx context.Context) (bool, string) {
			ok, err := check(ctx)
			return ok, fmt.Sprint(err)
		})
	}
}

func createWorkloads(t *testing.T, client kubernetes.Interface, namespace string) {
	t.Helper()
	meta, selector := metav1.ObjectMeta{Name: "web"}, &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	work := podTemplate()
	work.Spec.RestartPolicy = corev1.RestartPolicyNever
	work.Labels = nil
	options := metav1.CreateOptions{}
	_, err := client.AppsV1().Deployments(namespace).Create(t.Context(), &appsv1.Deployment{ObjectMeta: meta,
		Spec: appsv1.DeploymentSpec{Replicas: ptr.To(int32(2)), Selector: selector, Template: podTemplate()}}, options)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.AppsV1().DaemonSets(namespace).Create(t.Context(), &appsv1.DaemonSet{ObjectMeta: meta,
		Spec: appsv1.DaemonSetSpec{Selector: selector, Template: podTemplate()}}, options)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.AppsV1().StatefulSets(namespace).Create(t.Context(), &appsv1.StatefulSet{ObjectMeta: meta,
		Spec: appsv1.StatefulSetSpec{Replicas: ptr.To(int32(2)), ServiceName: "web", Selector: selector, Template: podTemplate()}}, options)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.BatchV1().Jobs(namespace).Create(t.Context(), &batchv1.Job{ObjectMeta: meta,
		Spec: batchv1.JobSpec{Template: work}}, options)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.CoreV1().Services(namespace).Create(t.Context(), &corev1.Service{ObjectMeta: meta,
		Spec: corev1.ServiceSpec{Selector: selector.MatchLabels, Ports: []corev1.ServicePort{{Port: 80}}}}, options)
	if err != nil {
		t.Fatal(err)
	}
}

func TestNamespaceIsDeletedWithItsPods(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	client := clientOf(p)
	namespaces := client.CoreV1().Namespaces()
	namespace, err := namespaces.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "short-"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	createWorkloads(t, client, namespace.Name)
	if err := namespaces.Delete(t.Context(), namespace.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "namespace is deleted", func(ctx context.Context) (bool, string) {
		have, err := namespaces.Get(ctx, namespace.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprintf("%+v", have.Status)
	})
}

func TestDependentsAreCollected(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	maps := clientOf(p).CoreV1().ConfigMaps(p.Namespace(t, "garbage"))
	owner, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owner"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "owned",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := maps.Delete(t.Context(), "owner", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "dependent is deleted", func(ctx context.Context) (bool, string) {
		_, err := maps.Get(ctx, "owned", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

func TestApprovedCertificateIsSigned(t *testing.T) {
	t.Parallel()
	requests := clientOf(localkube.Shared(t)).CertificatesV1().CertificateSigningRequests()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "someone"}}, key)
	if err != nil {
		t.Fatal(err)
	}
	request, err := requests.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "someone-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: raw}),
			SignerName: certificatesv1.KubeAPIServerClientSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	request.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{
		{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"},
	}
	if _, err := requests.UpdateApproval(t.Context(), request.Name, request, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "certificate is signed", func(ctx context.Context) (bool, string) {
		have, err := requests.Get(ctx, request.Name, metav1.GetOptions{})
		return err == nil && len(have.Status.Certificate) > 0, fmt.Sprint(err)
	})
}

func TestClaimOfAVolumeIsDeleted(t *testing.T) {
	t.Parallel()
	p := localkube.Shared(t)
	claims := clientOf(p).CoreV1().PersistentVolumeClaims(p.Namespace(t, "volumes"))
	_, err := claims.Create(t.Context(), &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "data"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
		}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := claims.Delete(t.Context(), "data", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "claim is deleted", func(ctx context.Context) (bool, string) {
		have, err := claims.Get(ctx, "data", metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(have.Finalizers, err)
	})
}
