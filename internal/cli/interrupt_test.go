package cli_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/internal/cli"
	"github.com/towline/towline/internal/cli/command"
)

// startSilentServer starts a server that accepts connections and never responds, and returns its address. connected is
// called for each connection.
func startSilentServer(t *testing.T, connected func()) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var accepting sync.WaitGroup
	accepting.Go(func() {
		var accepted []net.Conn
		for {
			connection, err := listener.Accept()
			if err != nil {
				break
			}
			accepted = append(accepted, connection)
			connected()
		}
		for _, connection := range accepted {
			_ = connection.Close()
		}
	})
	t.Cleanup(func() { _ = listener.Close(); accepting.Wait() })
	return listener.Addr().String()
}

// kubeconfigOf writes a kubeconfig with one context for server, and returns its path.
func kubeconfigOf(t *testing.T, server string) string {
	t.Helper()
	anyServer := httptest.NewTLSServer(http.NotFoundHandler())
	defer anyServer.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: anyServer.Certificate().Raw})
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],` +
		`"clusters":[{"name":"c","cluster":{"server":"` + server + `","certificate-authority-data":"` +
		base64.StdEncoding.EncodeToString(ca) + `"}}],"users":[{"name":"u","user":{"token":"x"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// wantInterrupted interrupts a command at its first connection, and fails the test unless the command ends at once.
// lineFor returns the command for the kubeconfig of a server that never responds.
func wantInterrupted(t *testing.T, lineFor func(kubeconfig string) string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var interrupted time.Time
	var once sync.Once
	path := kubeconfigOf(t, "https://"+startSilentServer(t, func() { once.Do(func() { interrupted = time.Now(); cancel() }) }))
	var out, errs bytes.Buffer
	code := cli.Run(ctx, strings.Fields(lineFor(path)), command.Streams{Out: &out, Err: &errs})
	// A hub logs before it connects.
	_, message, found := strings.Cut("\n"+errs.String(), "\nerror: interrupted")
	if code != 130 || !found || strings.Count(message, "\n") != 1 {
		t.Errorf("got code %d and error output %q, want 130 and an error in one line", code, errs.String())
	}
	if took := time.Since(interrupted); took > time.Second {
		t.Errorf("it ended %s after it was interrupted", took)
	}
}

// TestInterruptedWhileConnecting shows that a command ends at once if it is interrupted before its first change.
func TestInterruptedWhileConnecting(t *testing.T) {
	t.Parallel()
	const token = "--token=abcdef.0123456789abcdef --discovery-token-unsafe-skip-ca-verification=true"
	for name, args := range map[string]string{
		"join":         "join c --kubeconfig=SILENT --cluster-kubeconfig=SILENT",
		"unjoin":       "unjoin c --kubeconfig=SILENT",
		"unjoin dry":   "unjoin c --kubeconfig=SILENT --dry-run",
		"token create": "token create --kubeconfig=SILENT",
		"token list":   "token list --kubeconfig=SILENT",
		"token delete": "token delete abcdef --kubeconfig=SILENT",
		"register":     "register 127.0.0.1:1 " + token + " --kubeconfig=SILENT",
		"unregister":   "unregister c --cluster-kubeconfig=SILENT --karmada-config=SILENT",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wantInterrupted(t, func(path string) string { return "karmadactl " + strings.ReplaceAll(args, "SILENT", path) })
		})
	}
}

// TestInterruptedWhileConnectingByEnvironment shows the same for commands that use KUBECONFIG, and for the start of a
// hub.
func TestInterruptedWhileConnectingByEnvironment(t *testing.T) {
	const cluster = " --namespace=n --cluster=c"
	for _, line := range []string{
		"sveltosctl register cluster --pullmode" + cluster,
		"sveltosctl register cluster --pullmode --apply-to-context=c" + cluster,
		"sveltosctl register cluster --pullmode --apply-to-kubeconfig=SILENT" + cluster,
		"sveltosctl register cluster --kubeconfig=SILENT" + cluster,
		"sveltosctl register cluster --fleet-cluster-context=c" + cluster,
		"sveltosctl register cluster-eks --endpoint=https://127.0.0.1:1 --eks-cluster-name=c" + cluster,
		"sveltosctl deregister cluster" + cluster,
		"sveltosctl generate kubeconfig",
		"sveltosctl generate kubeconfig --context=c",
		"sveltosctl show addons",
		"towline hub --log-format=json --diagnostics-address= --health-address= --cache-dir=/nowhere",
	} {
		t.Run(line, func(t *testing.T) {
			wantInterrupted(t, func(path string) string {
				t.Setenv("KUBECONFIG", path)
				return strings.ReplaceAll(line, "SILENT", path)
			})
		})
	}
}
