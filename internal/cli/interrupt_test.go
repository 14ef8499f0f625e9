package cli_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/towline/towline/internal/cli"
)

// silent accepts connections and never responds. It returns its address. connected is called for each connection.
func silent(t *testing.T, connected func()) string {
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
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],` +
		`"clusters":[{"name":"c","cluster":{"server":"` + server + `","insecure-skip-tls-verify":true}}],"users":[{"name":"u","user":{"token":"x"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
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
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var interrupted time.Time
			var once sync.Once
			path := kubeconfigOf(t, "https://"+silent(t, func() { once.Do(func() { interrupted = time.Now(); cancel() }) }))
			var out, errs bytes.Buffer
			command := append([]string{"karmadactl"}, strings.Fields(strings.ReplaceAll(args, "SILENT", path))...)
			code := cli.Run(ctx, command, cli.Streams{Out: &out, Err: &errs})
			if code != 130 || !strings.HasPrefix(errs.String(), "error: interrupted: ") || strings.Count(errs.String(), "\n") != 1 {
				t.Errorf("got code %d and error output %q, want 130 and one line", code, errs.String())
			}
			if took := time.Since(interrupted); took > time.Second {
				t.Errorf("it ended %s after it was interrupted", took)
			}
		})
	}
}
