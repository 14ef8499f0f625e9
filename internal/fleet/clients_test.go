package fleet_test

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

func TestConfigOfAPushMember(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	ns := plane.Namespace(t, "clients")
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	clients := fleet.NewClients(hubClient, plane.Config, fleet.IdentityPolicy{}, nil)
	m := fleet.Member{Namespace: ns, Name: "one", Mode: fleet.Push, KubeconfigSecret: "k"}

	if _, err := clients.Config(t.Context(), m); err == nil || !strings.Contains(err.Error(), `"k" not found`) {
		t.Errorf("Config() without a Secret: error = %v", err)
	}
	raw, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "k"}, Data: map[string][]byte{"kubeconfig": raw}}
	if err := hubClient.Create(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	first, err := clients.Config(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := clients.Config(t.Context(), m); err != nil || again != first {
		t.Errorf("Config() again = %p, %v, want the same config %p", again, err, first)
	}
	facts, err := fleet.Probe(t.Context(), first)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(facts.Version, "v1.") || !facts.Complete || !slices.Contains(facts.APIVersions, "apps/v1/Deployment") ||
		!slices.Contains(facts.APIVersions, "v1/ConfigMap") || slices.Contains(facts.APIVersions, "autoscaling/v1/Scale") {
		t.Errorf("Probe() = %+v", facts)
	}
	secret.Data["other"] = []byte("{}")
	if err := hubClient.Update(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	if changed, err := clients.Config(t.Context(), m); err != nil || changed == first {
		t.Errorf("Config() after a change = %p, %v, want another config", changed, err)
	}
	m.KubeconfigKey = "missing"
	if _, err := clients.Config(t.Context(), m); err == nil || !strings.Contains(err.Error(), `has no key "missing"`) {
		t.Errorf("Config() of a missing key: error = %v", err)
	}
}

func TestClientsWithoutASecret(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	clients := fleet.NewClients(nil, plane.Config, fleet.IdentityPolicy{}, nil)
	if got, err := clients.Config(t.Context(), fleet.Member{Mode: fleet.Push}); err != nil || got != plane.Config {
		t.Errorf("Config() of the hub = %v, %v", got, err)
	}
	if _, err := clients.Config(t.Context(), fleet.Member{Mode: fleet.Pull}); !errors.Is(err, fleet.ErrPull) {
		t.Errorf("Config() of a pull member: error = %v, want ErrPull", err)
	}
}

func TestProxyURLIsCheckedWithoutQuotingIt(t *testing.T) {
	t.Parallel()
	for address, valid := range map[string]bool{
		"": true, "http://proxy:3128": true, "https://me:secret@proxy": true, "socks5://proxy:1080": true,
		"http://me:se cret@proxy:3128": false, "ftp://me:secret@proxy": false, "me:secret@proxy:3128": false, "http://": false,
	} {
		err := fleet.ValidateProxyURL(address)
		if (err == nil) != valid {
			t.Errorf("%q: got error %v", address, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%q is quoted: %v", address, err)
		}
	}
}
