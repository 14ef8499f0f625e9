package hub_test

import (
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

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
)

// freeAddress returns a local address without a listener.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String()
}

// fetch gets a URL with a bearer token, or without one if it is "".
func fetch(url, token string) (int, string, error) {
	transport := &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the certificate is self-signed
	}
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

// probe returns an error unless address answers path with the status.
func probe(address, path string, want int) error {
	got, body, err := fetch("http://"+address+path, "")
	if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%s: got %d %s, want %d", path, got, strings.TrimSpace(body), want)
	}
	return nil
}

// createToken returns a token of a new ServiceAccount, with the ClusterRole reader unless it is "".
func (w *world) createToken(name, reader string) string {
	w.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: w.ns, Name: name}}
	w.create(account)
	if reader != "" {
		w.create(&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: w.ns + "-" + name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: reader},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: w.ns, Name: name}},
		})
	}
	token := &authenticationv1.TokenRequest{}
	w.must(w.SubResource("token").Create(w.Context(), account, token))
	return token.Status.Token
}

func TestDiagnosticsRequireAuthorization(t *testing.T) {
	w := newPrivateWorld(t)
	// The hub has the permissions of config/hub.yaml, without the permissions to deploy to its own cluster.
	config := w.installHub()
	w.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "self"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "projectsveltos", Name: "towline-hub"}},
	})
	opts := hub.Options{
		InstallCRDs: true, RegisterSelf: true, CacheDir: t.TempDir(), HealthAddress: freeAddress(t), DiagnosticsAddress: freeAddress(t),
	}
	w.start(config, opts)
	w.eventually("ready", func() error { return probe(opts.HealthAddress, "/readyz", http.StatusOK) })
	w.must(errors.Join(probe(opts.HealthAddress, "/healthz", http.StatusOK), probe(opts.HealthAddress, "/metrics", http.StatusNotFound)))

	reader := w.createToken("reader", "towline-metrics-reader")
	metrics := "https://" + opts.DiagnosticsAddress + "/metrics"
	for who, tc := range map[string]struct {
		token string
		want  int
	}{
		"no token":      {"", http.StatusUnauthorized},
		"unknown token": {"e30.e30.e30", http.StatusUnauthorized},
		"no permission": {w.createToken("unrelated", ""), http.StatusForbidden},
	} {
		if got, body, err := fetch(metrics, tc.token); err != nil || got != tc.want || strings.Contains(body, "projectsveltos") {
			t.Errorf("%s: got %d %q and %v, want %d", who, got, body, err, tc.want)
		}
	}

	w.create(&rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "profiles"}, Rules: []rbacv1.PolicyRule{{NonResourceURLs: []string{"/debug/pprof/*"}, Verbs: []string{"get"}}},
	})
	heap := "https://" + opts.DiagnosticsAddress + "/debug/pprof/heap?debug=1"
	if got, body, err := fetch(heap, w.createToken("profiler", "profiles")); err != nil || got != http.StatusOK || !strings.HasPrefix(body, "heap profile: ") {
		t.Errorf("heap profile: got %d %.100q and %v", got, body, err)
	}
	if got, body, err := fetch(heap, reader); err != nil || got != http.StatusForbidden {
		t.Errorf("a reader of metrics gets the heap profile: %d %.100q and %v", got, body, err)
	}

	w.createConfigMap("manifests", manifest("a"))
	profile := w.createProfile(func(s *configv1beta1.ProfileSpec) {
		s.ClusterSelector.MatchLabels = map[string]string{"sveltos-agent": "present"}
	})
	one := w.createMember("one", nil)
	before := one.DeepCopy()
	one.Status.Ready, one.Status.AgentLastReportTime = true, &metav1.Time{Time: time.Unix(2e9, 0)}
	one.Status.ConnectionStatus, one.Status.ConnectionFailures = libv1beta1.ConnectionDown, 3
	w.must(w.Status().Patch(t.Context(), one, client.MergeFrom(before)))
	w.eventually("provisioned", func() error {
		_, err := w.getVersion("a")
		return err
	})
	w.must(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "a"}}))

	mgmt := `cluster_name="mgmt",cluster_namespace="mgmt",cluster_type="Sveltos"`
	feature := `cluster_name="mgmt",cluster_namespace="mgmt",cluster_type="Sveltos",feature="Resources"`
	of := `profile_kind="ClusterProfile",profile_name="` + profile.Name + `",profile_namespace=""`
	other := `cluster_name="one",cluster_namespace="` + w.ns + `",cluster_type="Sveltos"`
	w.eventually("series", func() error {
		status, body, err := fetch(metrics, reader)
		if err != nil || status != http.StatusOK {
			return fmt.Errorf("got %d and %w", status, err)
		}
		for _, want := range []string{
			"cluster_connectivity_status{" + mgmt + "} 0", "cluster_connectivity_status{" + other + "} ",
			"connection_failures{" + mgmt + "} 0", "kubernetes_version_info{" + mgmt + `,kubernetes_version="v1.`,
			"agent_last_heartbeat_timestamp_seconds{" + other + "} 2e+09", "matching_clusters{" + of + "} 1",
			"reconcile_duration_seconds_count{" + feature + "} 1", "reconcile_operations_total{" + feature + "} ",
			"reconcile_outcome_total{" + feature + "," + of + `,status="success"} 1`, "total_drifts{" + feature + "," + of + "} 1",
			"reconcile_consecutive_failures{" + feature + "," + of + "} 0", "reconcile_last_success_timestamp_seconds{" + feature + "," + of + "} 1",
		} {
			if !strings.Contains(body, "\nprojectsveltos_"+want) {
				return fmt.Errorf("no series %s in:\n%s", want, body)
			}
		}
		return nil
	})
	brief := w.createMember("brief", nil)
	shown := func(want bool) func() error {
		return func() error {
			_, body, err := fetch(metrics, reader)
			if got := strings.Contains(body, `{cluster_name="brief",`); err == nil && got != want {
				err = fmt.Errorf("shown: %t", got)
			}
			return err
		}
	}
	w.eventually("a cluster has metrics", shown(true))
	w.must(w.Delete(t.Context(), brief))
	w.eventually("they go with it", shown(false))

	w.must(w.plane.Kill())
	w.eventually("not ready without the API server", func() error { return probe(opts.HealthAddress, "/readyz", http.StatusServiceUnavailable) })
	w.must(probe(opts.HealthAddress, "/healthz", http.StatusOK))
	w.must(w.plane.Restart(t.Context()))
	w.eventually("ready again", func() error { return probe(opts.HealthAddress, "/readyz", http.StatusOK) })
}

func TestAddressInUseIsReported(t *testing.T) {
	t.Parallel()
	sharedHub()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	err = hub.Run(t.Context(), hubPlane.Config, hub.Options{HealthAddress: listener.Addr().String()})
	if err == nil || !strings.Contains(err.Error(), "choose another address with --health-address") {
		t.Errorf("got %v, want an error that names the flag", err)
	}
}
