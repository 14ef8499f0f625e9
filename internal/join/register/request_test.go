package register_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"

	"github.com/towline/towline/internal/join/register"
)

func TestInvalidRequests(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		change func(*register.Request)
		want   string
	}{
		"path":       {func(r *register.Request) { r.Endpoint = "hub:6443/x" }, `the endpoint of the control plane must be <host>:<port>, and it is "hub:6443/x"`},
		"http":       {func(r *register.Request) { r.Endpoint = "http://hub:6443" }, `the endpoint of the control plane must be <host>:<port>, and it is "http://hub:6443"`},
		"long life":  {func(r *register.Request) { r.CertLifetime = 366 * 24 * time.Hour }, "--cert-expiration-seconds must be at most 31536000, since hubs approve certificates of at most this lifetime"},
		"short life": {func(r *register.Request) { r.CertLifetime = time.Minute }, "--cert-expiration-seconds must be at least 600, since Kubernetes issues no shorter certificates"},
		"proxy":      {func(r *register.Request) { r.ProxyServerAddress = "ftp://x" }, ""},
		"region":     {func(r *register.Request) { r.Region = "a b" }, ""},
		"name":       {func(r *register.Request) { r.ClusterName = "rbac-generator" }, ""},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := register.Request{
				Endpoint: "127.0.0.1:1", Token: "abcdef.0123456789abcdef", Pins: []string{"sha256:00"}, ClusterName: "c",
				Member: &rest.Config{Host: "https://127.0.0.1:1"},
				Out:    func(line string) { t.Errorf("got line %q, want none", line) },
			}
			c.change(&r)
			err := register.Register(t.Context(), r)
			if err == nil {
				t.Fatal("got no error")
			}
			if diff := cmp.Diff(c.want, err.Error()); c.want != "" && diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}
