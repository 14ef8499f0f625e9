package bootstrap_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// hubSetUp creates the objects of a hub on the control plane that the tests share, once.
type hubSetUp struct {
	once sync.Once
	err  error
}

var shared hubSetUp

// hub returns a hub with the objects of EnsureHubObjects, and an administrator's client for it.
func hub(t *testing.T) (*localkube.Plane, client.Client) {
	t.Helper()
	plane := localkube.Shared(t)
	hubClient, err := client.New(plane.Config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	shared.once.Do(func() { shared.err = setUpHub(plane.Config, hubClient) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return plane, hubClient
}

func setUpHub(config *rest.Config, hubClient client.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := hubClient.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: kube.AgentNamespace}}); err != nil {
		return err
	}
	if err := crds.Install(ctx, hubClient); err != nil {
		return err
	}
	for range 2 {
		if err := bootstrap.EnsureHubObjects(ctx, config, join.HubAddress{Server: config.Host, CA: config.CAData}); err != nil {
			return err
		}
	}
	return nil
}

// eventually waits until look returns "", and fails with the last result otherwise.
func eventually(t *testing.T, look func() (wrong string)) {
	t.Helper()
	last := ""
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) {
		last = look()
		return last == "", nil
	})
	if err != nil {
		t.Fatalf("%v: %s", err, last)
	}
}

// tokenConfig returns the configuration of a holder of the token.
func tokenConfig(config *rest.Config, token bootstrap.Token) *rest.Config {
	config = rest.AnonymousClientConfig(config)
	config.BearerToken = token.String()
	return config
}

// agentConfig is the configuration of the agent of cluster.
func agentConfig(config *rest.Config, cluster string) *rest.Config {
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: bootstrap.AgentUser(cluster), Groups: []string{bootstrap.AgentsGroup, "system:authenticated"}}
	return config
}

func clientOf(t *testing.T, config *rest.Config) client.WithWatch {
	t.Helper()
	made, err := client.NewWithWatch(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func endpoint(config *rest.Config) string { return strings.TrimPrefix(config.Host, "https://") }
