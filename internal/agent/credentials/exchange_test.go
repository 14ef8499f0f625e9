package credentials_test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/agent/credentials"
	"github.com/towline/towline/internal/join"
)

func opened(t *testing.T, o credentials.Options) *credentials.Credential {
	t.Helper()
	credential, err := credentials.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return credential
}

func exchanged(t *testing.T, o credentials.Options) *credentials.Credential {
	t.Helper()
	credential := opened(t, o)
	if err := credential.Exchange(t.Context()); err != nil {
		t.Fatal(err)
	}
	return credential
}

func TestExchangeReturnsTheSecretOfTheManifestsToken(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	o, _ := credentialFixture(t, plane)
	credential := opened(t, o)
	if got := credential.ExchangedSecretUID(); got != "" {
		t.Errorf("before the exchange: got %q, want none", got)
	}
	copied := credential.Config()
	registration := secretOf(t, hubClient, o.Namespace, join.RegistrationSecret("c"))
	if err := credential.Exchange(t.Context()); err != nil {
		t.Fatal(err)
	}
	once := stored(t, o)
	if err := credential.Exchange(t.Context()); err != nil {
		t.Fatal(err)
	}
	if string(once) != string(stored(t, o)) {
		t.Error("the second exchange did something")
	}
	for what, credential := range map[string]*credentials.Credential{"after the exchange": credential, "after a restart": opened(t, o)} {
		if got := credential.ExchangedSecretUID(); got != registration.UID {
			t.Errorf("%s: got %q, want %s", what, got, registration.UID)
		}
	}
	if err := hubClient.Delete(t.Context(), registration); err != nil {
		t.Fatal(err)
	}
	if !works(t, copied, o) {
		t.Error("the agent's own token went with the registration Secret")
	}
	if err := hubClient.Delete(t.Context(), secretNamed(o.Namespace, join.AnchorSecret("c"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent's own token is rejected without the anchor Secret", func() bool { return !works(t, copied, o) })
}

func TestTokenOfACopiedManifestIsRevokedWithItsSecret(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	o, _ := credentialFixture(t, plane)
	credential := opened(t, o)
	if !works(t, credential.Config(), o) {
		t.Fatal("the manifest's token does not work")
	}
	if err := hubClient.Delete(t.Context(), secretNamed(o.Namespace, join.RegistrationSecret("c"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the manifest's token is rejected", func() bool { return !works(t, credential.Config(), o) })
	if err := credential.Exchange(t.Context()); !errors.Is(err, credentials.ErrRejected) {
		t.Errorf("got error %v, want ErrRejected", err)
	}
	repair := credentials.Repair(o.Namespace, "c")
	for _, want := range []string{
		"sveltosctl register cluster --namespace=" + o.Namespace + " --cluster=c --pullmode > registration.yaml", "kubectl apply -f registration.yaml",
	} {
		if !strings.Contains(repair, want) {
			t.Errorf("repair: got %q, want it to contain %q", repair, want)
		}
	}
}

func TestRenewingKeepsBindingProxyAndCertificateAuthority(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	o, _ := credentialFixture(t, plane)
	credential := exchanged(t, o)
	first := credential.Expires()
	eventually(t, "the next second", func() bool { return time.Since(first.Add(-o.Life)) > time.Second })
	if err := credential.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !credential.Expires().After(first) {
		t.Error("the token was not renewed")
	}
	if string(opened(t, o).Config().CAData) != string(plane.Config.CAData) {
		t.Error("the certificate authority is lost")
	}
	registration := secretOf(t, hubClient, o.Namespace, join.RegistrationSecret("c"))
	if got := credential.ExchangedSecretUID(); got != registration.UID {
		t.Errorf("exchanged: got %s, want %s", got, registration.UID)
	}
	if err := hubClient.Delete(t.Context(), secretNamed(o.Namespace, join.AnchorSecret("c"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the renewed token is rejected without the anchor Secret", func() bool { return !works(t, credential.Config(), o) })
}

func TestRenewingKeepsTheProxy(t *testing.T) {
	t.Parallel()
	plane, _ := hub(t)
	o, _ := credentialFixture(t, plane)
	proxy := connectProxy(t)
	r := pullRequest(o.Namespace, "c")
	r.Options.ProxyURL = proxy.url
	docs := documents(t, registered(t, plane, r))
	put(t, o, decode(t, docs[6]["data"].(document)[join.KubeconfigKey].(string)))
	exchanged(t, o)
	again := opened(t, o)
	used := proxy.used.Load()
	if used == 0 {
		t.Error("the exchange did not go through the proxy")
	}
	if !works(t, again.Config(), o) || proxy.used.Load() == used {
		t.Error("the stored kubeconfig does not use the proxy")
	}
}

func TestRevokeInvalidatesEarlierTokens(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	o, _ := credentialFixture(t, plane)
	credential := exchanged(t, o)
	stolen, _ := agentConfig(t, registered(t, plane, pullRequest(o.Namespace, "c")))
	if !works(t, stolen, o) {
		t.Fatal("the manifest's token does not work")
	}
	r := pullRequest(o.Namespace, "c")
	r.Revoke = true
	// The times in tokens are in seconds.
	eventually(t, "the next second", func() bool { return time.Since(credential.Expires().Add(-o.Life)) > time.Second })
	fresh := registered(t, plane, r)
	config, _ := agentConfig(t, fresh)
	eventually(t, "the token of the stolen manifest is rejected", func() bool { return !works(t, stolen, o) })
	eventually(t, "the agent's own token is rejected", func() bool { return !works(t, credential.Config(), o) })
	if err := credential.Renew(t.Context()); !errors.Is(err, credentials.ErrRejected) {
		t.Errorf("got error %v, want ErrRejected", err)
	}
	eventually(t, "the new manifest works", func() bool { return works(t, config, o) })
	docs := documents(t, fresh)
	put(t, o, decode(t, docs[6]["data"].(document)[join.KubeconfigKey].(string)))
	if !works(t, exchanged(t, o).Config(), o) {
		t.Error("the agent does not come back with the new manifest")
	}

	err := join.RegisterPull(t.Context(), plane.Config, r, failing{errors.New("broken pipe")})
	wantText(t, err, "broken pipe")
	if err := hubClient.Get(t.Context(), client.ObjectKey{Namespace: o.Namespace, Name: "c"}, &corev1.ServiceAccount{}); err != nil {
		t.Errorf("a failed revocation left no identity: %v", err)
	}
}

func TestRunReturnsErrRejected(t *testing.T) {
	t.Parallel()
	plane, hubClient := hub(t)
	o, _ := credentialFixture(t, plane)
	clock := clocktesting.NewFakeClock(time.Now())
	o.Clock = clock
	credential := exchanged(t, o)
	finished := make(chan error, 1)
	go func() { finished <- credential.Run(t.Context()) }()
	if err := hubClient.Delete(t.Context(), secretNamed(o.Namespace, join.AnchorSecret("c"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the hub refuses the token", func() bool { return !works(t, credential.Config(), o) })
	eventually(t, "Run waits", clock.HasWaiters)
	clock.Step(20 * time.Second)
	select {
	case err := <-finished:
		if !errors.Is(err, credentials.ErrRejected) {
			t.Errorf("got %v, want ErrRejected", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("Run did not notice")
	}
}

// proxy is an HTTP CONNECT proxy that counts its connections.
type proxy struct {
	url  string
	used atomic.Int64
}

func connectProxy(t *testing.T) *proxy {
	t.Helper()
	p := &proxy{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if request.Method != http.MethodConnect {
			http.Error(w, "only CONNECT", http.StatusMethodNotAllowed)
			return
		}
		out, err := net.Dial("tcp", request.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		in, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			_ = out.Close()
			return
		}
		p.used.Add(1)
		_, _ = io.WriteString(in, "HTTP/1.1 200 OK\r\n\r\n")
		go func() { _, _ = io.Copy(out, in); _ = out.Close() }()
		go func() { _, _ = io.Copy(in, out); _ = in.Close() }()
	}))
	t.Cleanup(server.Close)
	p.url = server.URL
	return p
}
