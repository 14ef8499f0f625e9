package join_test

import (
	"errors"
	"io"
	"net"
	"net/url"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/towline/towline/internal/join"
)

func TestFindHubAddressInOrder(t *testing.T) {
	plane, hubClient := hub(t)
	own := join.HubAddress{Server: plane.Config.Host, CA: plane.Config.CAData}
	given := join.HubAddress{Server: "https://given:6443", CA: []byte("given")}
	published := join.HubAddress{Server: "https://published:6443", CA: []byte("published")}
	check := func(what string, given, want join.HubAddress) {
		t.Helper()
		got, err := join.FindHubAddress(t.Context(), hubClient, plane.Config, given)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%s: got error %v and (-want +got):\n%s", what, err, diff)
		}
	}
	check("the kubeconfig's", join.HubAddress{}, own)
	check("given", given, given)
	check("given without a certificate authority", join.HubAddress{Server: given.Server}, join.HubAddress{Server: given.Server, CA: own.CA})

	address, err := url.Parse(plane.Config.Host)
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(address.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	if _, err := join.FindHubAddress(t.Context(), hubClient, plane.Config, join.HubAddress{}); !errors.Is(err, join.ErrNoHubAddress) {
		t.Errorf("an address in the cluster: got error %v, want ErrNoHubAddress", err)
	}
	check("given in a pod without a certificate authority", join.HubAddress{Server: given.Server}, join.HubAddress{Server: given.Server, CA: own.CA})

	config := clientcmdapi.NewConfig()
	config.Clusters[""] = &clientcmdapi.Cluster{Server: published.Server, CertificateAuthorityData: published.CA}
	kubeconfig, err := clientcmd.Write(*config)
	if err != nil {
		t.Fatal(err)
	}
	info := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespacePublic, Name: "cluster-info"}, Data: map[string]string{"kubeconfig": string(kubeconfig)},
	}
	if err := hubClient.Create(t.Context(), info); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := hubClient.Delete(t.Context(), info); err != nil {
			t.Error(err)
		}
	}()
	check("published", join.HubAddress{}, published)
	check("given before published", join.HubAddress{Server: given.Server}, join.HubAddress{Server: given.Server, CA: published.CA})
}

func TestRegisterPullTellsTheGivenCertificateAuthority(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	ca := certificate(t)
	r := pullRequest(plane.Namespace(t, "ca"), "c")
	r.Options = join.AgentOptions{HubURL: "https://hub.example.com", HubCA: ca}
	unverified := rest.CopyConfig(plane.Config)
	unverified.Insecure, unverified.CAData = true, nil
	plain := pullRequest(r.Namespace, "plain")
	wantText(t, join.RegisterPull(t.Context(), unverified, plain, io.Discard), "insecure-skip-tls-verify")
	config, _ := agentConfig(t, registered(t, plane, r))
	if diff := cmp.Diff(ca, string(config.CAData)); diff != "" {
		t.Errorf("certificate authority (-want +got):\n%s", diff)
	}
}
