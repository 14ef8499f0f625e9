package stories

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/localkube"
)

// rejectsUntrustedHubs tries to register with a hub whose hash is another one, with cluster-info that an impostor
// changes or passes on, and with tokens that are not valid for the hub. plane is already registered; each attempt must
// fail before that is checked.
func (w *world) rejectsUntrustedHubs(plane *localkube.Plane) {
	w.t.Helper()
	hub, member := w.awaitStable(w.hub), w.awaitStable(plane)
	line := w.createTokenCommand()
	fields := strings.Fields(line)
	address, token, pin := fields[2], fields[4], fields[6]
	id, _, _ := strings.Cut(token, ".")
	deleted := strings.Fields(w.createTokenCommand())[4]
	w.runShell(w.hub, "karmadactl token delete "+deleted)
	expired := strings.Fields(w.createTokenCommand("--ttl=1s"))[4]
	w.eventually("the token expires", func() error {
		if out := w.runShell(w.hub, "karmadactl token list"); strings.Contains(out, expired) && !strings.Contains(w.tableRow(out, expired), "<invalid>") {
			return fmt.Errorf("the token is still listed:\n%s", out)
		}
		return nil
	})
	forged := id + ".0123456789abcdef"
	for what, worthless := range map[string]string{"a deleted token": deleted, "an expired token": expired, "a forged token": forged, "a made-up token": "aaaaaa.0123456789abcdef"} {
		w.wantTokenRejected(what, worthless)
	}
	in := w.startImpostor(nil)
	for _, attempt := range []struct{ what, address, token, pin, want string }{
		{"a wrong hash", address, token, "--discovery-token-ca-cert-hash=sha256:" + strings.Repeat("0", 64), "pinned"},
		{"a deleted token", address, deleted, "--discovery-token-ca-cert-hash=" + pin, "is invalid for this cluster or it has expired"},
		{"an expired token", address, expired, "--discovery-token-ca-cert-hash=" + pin, "is invalid for this cluster or it has expired"},
		{"a forged token", address, forged, "--discovery-token-ca-cert-hash=" + pin, "JWS signature"},
		{"a made-up token", address, "aaaaaa.0123456789abcdef", "--discovery-token-ca-cert-hash=" + pin, "is invalid for this cluster or it has expired"},
		{"a forged token and no hash", address, forged, "--discovery-token-unsafe-skip-ca-verification=true", "JWS signature"},
		{"cluster-info tampered with", w.startImpostor(w.replaceAuthority), token, "--discovery-token-ca-cert-hash=" + pin, "JWS signature"},
		{"cluster-info tampered with and no hash", w.startImpostor(w.replaceAuthority), token, "--discovery-token-unsafe-skip-ca-verification=true", "JWS signature"},
		{"an impostor", in, token, "--discovery-token-ca-cert-hash=" + pin, "couldn't validate the identity of the API Server"},
	} {
		// The namespace differs from the one of the agent that runs.
		_, err := output(w.shellCommand(plane, fmt.Sprintf("karmadactl register %s --token %s %s --cluster-name=attacked --namespace=attacked --discovery-timeout=3s",
			attempt.address, attempt.token, attempt.pin)))
		if err == nil || !strings.Contains(err.Error(), "error: ") || !strings.Contains(err.Error(), attempt.want) {
			w.t.Errorf("%s: register ended with %v, want an error with %q", attempt.what, err, attempt.want)
		}
	}
	w.wantUnchanged("an untrustworthy hub", w.hub, hub)
	w.wantUnchanged("an untrustworthy hub", plane, member)
}

// impostor is a server between a cluster and the hub, with its own certificate.
type impostor struct {
	hub    *rest.Config
	ca     []byte
	change func(info *corev1.ConfigMap, ca []byte) error
}

// startImpostor starts an impostor that returns cluster-info of the hub after a change, and returns its address.
func (w *world) startImpostor(change func(info *corev1.ConfigMap, ca []byte) error) string {
	w.t.Helper()
	i := &impostor{hub: rest.AnonymousClientConfig(w.hub.Config), change: change}
	server := httptest.NewUnstartedServer(i)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // clients must not trust its certificate
	server.StartTLS()
	w.t.Cleanup(server.Close)
	i.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	return strings.TrimPrefix(server.URL, "https://")
}

func (i *impostor) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	if !strings.HasSuffix(r.URL.Path, "/configmaps/cluster-info") {
		http.Error(rw, "this is none of the hub's", http.StatusTeapot)
		return
	}
	info, err := kubernetes.NewForConfigOrDie(i.hub).CoreV1().ConfigMaps("kube-public").Get(r.Context(), "cluster-info", metav1.GetOptions{})
	if err == nil && i.change != nil {
		err = i.change(info, i.ca)
	}
	if err != nil {
		http.Error(rw, err.Error(), http.StatusBadGateway)
		return
	}
	info.APIVersion, info.Kind = "v1", "ConfigMap"
	rw.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(rw).Encode(info) // the client may have closed the connection
}

// replaceAuthority replaces the hub's certificate authority by the impostor's. The impostor cannot sign that.
func (w *world) replaceAuthority(info *corev1.ConfigMap, ca []byte) error {
	config, err := clientcmd.Load([]byte(info.Data["kubeconfig"]))
	if err != nil {
		return err
	}
	for _, cluster := range config.Clusters {
		cluster.CertificateAuthorityData = ca
	}
	raw, err := clientcmd.Write(*config)
	info.Data["kubeconfig"] = string(raw)
	return err
}
