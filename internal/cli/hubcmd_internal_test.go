package cli

import (
	"errors"
	"net"
	"testing"

	"github.com/spf13/pflag"

	"github.com/towline/towline/internal/egress"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/faults"
)

// TestEgressFlags connects with the policies of command lines. Nothing listens on port 1.
func TestEgressFlags(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args            []string
		denied, allowed []string
	}{
		"default":                {nil, []string{"169.254.169.254:1"}, []string{"127.0.0.1:1", "localhost:1"}},
		"a denied network":       {[]string{"--denied-networks=127.1.0.0/16"}, []string{"169.254.169.254:1", "127.1.2.3:1"}, []string{"127.0.0.1:1"}},
		"several, in two flags":  {[]string{"--denied-networks=127.1.0.0/16,127.2.0.0/16", "--denied-networks=127.3.0.0/16"}, []string{"127.1.0.1:1", "127.2.0.1:1", "127.3.0.1:1"}, []string{"127.4.0.1:1"}},
		"nothing is denied":      {[]string{"--denied-networks="}, nil, []string{"127.0.0.1:1"}},
		"allowed hosts":          {[]string{"--allowed-hosts=localhost,*.example.com"}, []string{"127.0.0.1:1", "example.com:1", "localhost.example:1"}, []string{"localhost:1"}},
		"an allowed, denied one": {[]string{"--allowed-hosts=127.1.2.3", "--denied-networks=127.1.0.0/16"}, []string{"127.1.2.3:1", "127.0.0.1:1"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, flags := hubFlags{}, pflag.NewFlagSet("hub", pflag.ContinueOnError)
			f.addHub(flags)
			if err := errors.Join(flags.Parse(c.args), f.complete()); err != nil {
				t.Fatal(err)
			}
			dial := func(address string) error {
				connection, err := f.options.Egress.Dial(t.Context(), &net.Dialer{}, "tcp", address)
				if err == nil {
					t.Errorf("%s: got connection %v", address, connection.Close())
				}
				return err
			}
			for _, address := range c.denied {
				if err := dial(address); !errors.Is(err, egress.ErrDenied) {
					t.Errorf("%s: got error %v, want ErrDenied", address, err)
				}
			}
			for _, address := range c.allowed {
				if err := dial(address); errors.Is(err, egress.ErrDenied) {
					t.Errorf("%s: got error %v, want another one", address, err)
				}
			}
		})
	}
}

// TestHubNeedsAdmissionPolicies starts hubs at an API server that shows no ValidatingAdmissionPolicies, as those before
// Kubernetes 1.30.
func TestHubNeedsAdmissionPolicies(t *testing.T) {
	t.Parallel()
	config := faults.Wrap(localkube.Shared(t).Config, faults.HideAdmissionPolicies)
	for name, options := range map[string]hub.Options{"default": {}, "first start": {InstallCRDs: true}, "shard": {ShardKey: "a"}} {
		if err := runHub(t.Context(), config, options); !errors.Is(err, kube.ErrNoAdmissionPolicies) {
			t.Errorf("%s: got error %v, want ErrNoAdmissionPolicies", name, err)
		}
	}
}
