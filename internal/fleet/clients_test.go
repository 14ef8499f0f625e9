package fleet_test

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/fleet/identity"
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
	clients := fleet.NewClients(fleet.SecretReaders{Live: hubClient}, plane.Config, fleet.IdentityPolicy{}, nil)
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

// countingReader counts the objects that it reads.
type countingReader struct {
	client.Reader
	gets int
}

func (r *countingReader) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	r.gets++
	return r.Reader.Get(ctx, key, obj, opts...)
}

// metadataCache is a cache of metadata. Its metadata is current unless stale is set.
type metadataCache struct {
	client.Reader
	stale *metav1.PartialObjectMetadata
}

func (c *metadataCache) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	if c.stale != nil {
		c.stale.DeepCopyInto(obj.(*metav1.PartialObjectMetadata))
		return nil
	}
	return c.Reader.Get(ctx, key, obj, opts...)
}

// TestUnchangedSecretIsReadOnce uses one Secret that is valid for each kind of member.
func TestUnchangedSecretIsReadOnce(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	authority := string(plane.Config.CAData)
	for name, member := range map[string]func(m *fleet.Member, secret types.NamespacedName){
		"kubeconfig": func(m *fleet.Member, secret types.NamespacedName) {
			m.KubeconfigSecret, m.KubeconfigKey = secret.Name, "kubeconfig"
		},
		"access": func(m *fleet.Member, secret types.NamespacedName) {
			m.Access = &fleet.Access{Server: plane.Config.Host, Secret: secret}
		},
		"identity": func(m *fleet.Member, secret types.NamespacedName) {
			m.Identity = &libv1beta1.WorkloadIdentity{
				Provider: libv1beta1.WorkloadIdentityGCP, Endpoint: "127.0.0.1:1", GCP: &libv1beta1.GCPIdentity{}, CASecretRef: &corev1.SecretReference{Name: secret.Name},
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := plane.Namespace(t, "once")
			live, metadata := &countingReader{Reader: hubClient}, &metadataCache{Reader: hubClient}
			policy := fleet.IdentityPolicy{Namespaces: []string{ns}, Hosts: []string{"127.0.0.1"}, NewTransportWrapper: identity.Wrap}
			clients := fleet.NewClients(fleet.SecretReaders{Live: live, Metadata: metadata}, nil, policy, nil)
			secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "s"}}
			write := hubClient.Create
			// change writes the Secret with another token and certificate authority.
			change := func(version string) {
				secret.Data = map[string][]byte{"kubeconfig": raw, "token": []byte(version), "caBundle": []byte(authority), "ca.crt": []byte(authority + "# " + version + "\n")}
				if err := write(t.Context(), secret); err != nil {
					t.Fatal(err)
				}
			}
			change("1")
			m := fleet.Member{Namespace: ns, Name: "one", Mode: fleet.Push, UID: "first"}
			member(&m, client.ObjectKeyFromObject(secret))
			// get returns the configuration, and checks the number of reads of the Secret.
			get := func(reason string, reads int) *rest.Config {
				t.Helper()
				live.gets = 0
				config, err := clients.Config(t.Context(), m)
				if err != nil || live.gets != reads {
					t.Fatalf("%s: got %d reads and error %v, want %d reads", reason, live.gets, err, reads)
				}
				return config
			}
			first := get("first call", 1)
			for range 2 {
				if again := get("again", 0); again != first {
					t.Errorf("got another configuration of the same Secret: %p, want %p", again, first)
				}
			}
			write = func(ctx context.Context, obj client.Object, _ ...client.CreateOption) error {
				return hubClient.Update(ctx, obj)
			}
			change("2")
			second := get("after a change", 1)
			if second == first || get("again after a change", 0) != second {
				t.Errorf("got the configurations %p after a change and %p before", second, first)
			}
			m.UID = "second"
			get("another registration", 1)

			metadata.stale = &metav1.PartialObjectMetadata{ObjectMeta: *secret.ObjectMeta.DeepCopy()}
			second = get("the same metadata", 0)
			change("3")
			if got := get("stale metadata", 0); got != second {
				t.Errorf("got %p with stale metadata, want the former configuration %p", got, second)
			}
			metadata.stale = nil
			if third := get("current metadata", 1); third == second {
				t.Error("got the former configuration after the metadata has changed")
			}
			if err := hubClient.Delete(t.Context(), secret); err != nil {
				t.Fatal(err)
			}
			if config, err := clients.Config(t.Context(), m); err == nil {
				t.Errorf("got the configuration %p of a deleted Secret", config)
			}
		})
	}
}

func TestClientsWithoutASecret(t *testing.T) {
	t.Parallel()
	plane := localkube.Shared(t)
	clients := fleet.NewClients(fleet.SecretReaders{}, plane.Config, fleet.IdentityPolicy{}, nil)
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
			t.Errorf("the error quotes %q: %v", address, err)
		}
	}
}
