package cli

import (
	"errors"
	"net"
	"testing"

	"github.com/towline/towline/internal/egress"
)

// TestDeniedNetworksAreAdded denies one more network. The metadata services of clouds stay denied.
func TestDeniedNetworksAreAdded(t *testing.T) {
	t.Parallel()
	f := hubFlags{deniedNetworks: []string{"10.0.0.0/8"}}
	if err := f.complete(); err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"169.254.169.254:80", "10.1.2.3:80"} {
		connection, err := f.options.Egress.Dial(t.Context(), &net.Dialer{}, "tcp", address)
		if !errors.Is(err, egress.ErrDenied) {
			t.Errorf("%s: got %v, %v, want ErrDenied", address, connection, err)
		}
	}
}
