package agent_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/bundle"
)

// freeAddress returns an address without a listener.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// fetch gets a URL with a token, or without one if token is "".
func fetch(ctx context.Context, url, token string) (int, string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the certificate is self-signed
	}
	response, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

// memberToken returns a token of a new ServiceAccount of the member with these permissions.
func (w *world) memberToken(name string, rules ...rbacv1.PolicyRule) string {
	w.t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}}
	for _, obj := range []client.Object{
		account,
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: account.Namespace, Name: name}},
		},
	} {
		if err := w.client.Create(w.t.Context(), obj); err != nil {
			w.t.Fatal(err)
		}
	}
	token := &authenticationv1.TokenRequest{}
	if err := w.client.SubResource("token").Create(w.t.Context(), account, token); err != nil {
		w.t.Fatal(err)
	}
	return token.Status.Token
}

func TestMetricsNeedPermission(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	health, metrics := freeAddress(t), freeAddress(t)
	ctx, cancel := context.WithCancel(w.logging(t.Context()))
	ended := make(chan error, 1)
	go func() {
		ended <- agent.Run(ctx, agent.Options{
			Member: w.member.Config, Namespace: w.cluster.Namespace, Name: w.cluster.Name, Heartbeat: time.Second,
			HealthAddress: health, DiagnosticsAddress: metrics,
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	for _, path := range []string{"/healthz", "/readyz"} {
		w.eventually(path, func(ctx context.Context) error {
			got, body, err := fetch(ctx, "http://"+health+path, "")
			if err != nil || got != http.StatusOK {
				return fmt.Errorf("got %d %s and %w", got, body, err)
			}
			return nil
		})
	}
	w.deliver(bundleOf("one", "a"), bundle.StateApplied)
	if err := w.client.Delete(t.Context(), configMap("a")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("a", "one")

	url := "https://" + metrics + "/metrics"
	for name, tc := range map[string]struct {
		token string
		want  int
	}{
		"no token":      {"", http.StatusUnauthorized},
		"invalid token": {"e30.e30.e30", http.StatusUnauthorized},
		"no permission": {w.memberToken("unauthorized"), http.StatusForbidden},
	} {
		if got, body, err := fetch(t.Context(), url, tc.token); err != nil || got != tc.want {
			t.Errorf("%s: got %d %q and %v, want %d", name, got, body, err, tc.want)
		}
	}
	reader := w.memberToken("reader", rbacv1.PolicyRule{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}})
	w.eventually("the correction is counted", func(ctx context.Context) error {
		got, body, err := fetch(ctx, url, reader)
		if err != nil || got != http.StatusOK {
			return fmt.Errorf("got %d and %w", got, err)
		}
		if !strings.Contains(body, "\ntowline_agent_hub_connected{") || !strings.Contains(body, "\nprojectsveltos_total_drifts{cluster_name=") {
			return errors.New(body)
		}
		return nil
	})
}
