package cli_test

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/client-go/tools/clientcmd"

	"github.com/towline/towline/internal/localkube"
)

func TestHelpOfKarmadactlHasTheNameOfTheCall(t *testing.T) {
	t.Parallel()
	for name, called := range map[string]string{"bin/karmadactl": "karmadactl", "/usr/local/bin/kubectl-karmada": "kubectl karmada"} {
		if got := run(t, name, "register", "--help"); !strings.Contains(got.out, "Usage:\n  "+called+" register <host:port>") || strings.Contains(got.out, "Available Commands") {
			t.Errorf("%s register --help: got\n%s", name, got.out)
		}
	}
	for _, command := range []string{"join", "unjoin", "token", "unregister"} {
		if got := run(t, "towline", command, "--help"); got.code != 0 || !strings.Contains(got.out, "Usage:\n  towline "+command) {
			t.Errorf("towline %s --help: got %+v", command, got)
		}
	}
	for _, args := range []string{"karmada-agent --help", "/bin/karmada-agent --help", "towline karmada-agent --help"} {
		if got := run(t, strings.Fields(args)...); got.code != 0 || !strings.Contains(got.out, "--karmada-kubeconfig-secret") {
			t.Errorf("%s: got %+v", args, got)
		}
	}
}

func TestFlagsOfKarmadactlHaveTheirDefaults(t *testing.T) {
	t.Parallel()
	for args, want := range map[string][]string{
		"karmadactl join --help":         {`--cluster-namespace namespace.*"karmada-cluster"`, `--karmada-as-group`, `--dry-run`},
		"karmadactl unjoin --help":       {`--wait duration.*1m0s`, `--force`, `--orphan`},
		"karmadactl register --help":     {`-n, --namespace namespace.*"karmada-system"`, `--discovery-timeout.*5m0s`, `--cert-expiration-seconds.*31536000`, `--karmada-agent-replicas.*1\)`, `--enable-cert-rotation.*true`},
		"karmadactl unregister --help":   {`--agent-name name.*"karmada-agent"`, `--wait duration.*1m0s`, `--karmada-config file`, `--orphan`},
		"karmadactl token create --help": {`--ttl.*24h0m0s`, `--usages.*\[signing,authentication\]`, `--groups.*\[system:bootstrappers:karmada:default-cluster-token\]`},
	} {
		got := run(t, strings.Fields(args)...)
		for _, pattern := range want {
			// One line for each flag.
			if !regexp.MustCompile(pattern).MatchString(regexp.MustCompile(`\n {10,}`).ReplaceAllString(got.out, " ")) {
				t.Errorf("%s: no %q in\n%s", args, pattern, got.out)
			}
		}
	}
}

func TestWrongArgumentsOfKarmadactl(t *testing.T) {
	// A command that connects fails with another message.
	t.Setenv("KUBECONFIG", "/does/not/exist")
	directory := t.TempDir()
	several := filepath.Join(directory, "several")
	text := `{"apiVersion":"v1","kind":"Config","current-context":"a","contexts":[{"name":"a","context":{"cluster":"kind_a","user":"a"}},{"name":"b","context":{"cluster":"b","user":"a"}}],` +
		`"clusters":[{"name":"kind_a","cluster":{"server":"https://127.0.0.1:1"}},{"name":"b","cluster":{"server":"http://127.0.0.1:1"}}],"users":[{"name":"a","user":{}}]}`
	if err := os.WriteFile(several, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const token = "--token=abcdef.0123456789abcdef --discovery-token-unsafe-skip-ca-verification=true"
	for args, want := range map[string]string{
		"karmadactl nonsense":                        `unknown command "nonsense" for "karmadactl"`,
		"karmadactl hub":                             `unknown command "hub"`,
		"karmadactl register cluster x":              "exactly one argument is allowed",
		"karmadactl join":                            "cluster name is required",
		"karmadactl join a b":                        "only the cluster name is allowed as an argument",
		"karmadactl join Ab":                         "invalid cluster name(Ab): ",
		"karmadactl join rbac-generator":             "rbac-generator",
		"karmadactl join " + strings.Repeat("a", 49): "must be no more than 48 characters",
		"karmadactl join a --karmada-as-group=g":     "need --karmada-as",
		"karmadactl join a":                          `failed to get control plane rest config. context: , kubeconfig: , error: no kubeconfig found: --kubeconfig is not set; no file of KUBECONFIG ("/does/not/exist")`,
		"karmadactl join a --karmada-context=c --kubeconfig=" + several:                                           "failed to get control plane rest config. context: c, kubeconfig: " + several,
		"karmadactl join a --kubeconfig=" + several:                                                               "failed to get joining cluster config. error: no kubeconfig found: --cluster-kubeconfig is not set",
		"karmadactl join a --kubeconfig=" + several + " --cluster-kubeconfig=" + several + " --cluster-context=c": `no context "c"`,
		"karmadactl unjoin":                                                        "cluster name is required",
		"karmadactl unjoin a --wait=0s":                                            " --wait 0s  must be a positive duration, e.g. 1m0s ",
		"karmadactl unjoin a --wait=-1s":                                           " --wait -1s  must be a positive duration, e.g. 1m0s ",
		"karmadactl unregister":                                                    "cluster name is required",
		"karmadactl unregister a":                                                  "--cluster-kubeconfig is required to specify KUBECONFIG file path to access unregistering member cluster",
		"karmadactl unregister a --cluster-kubeconfig=x --wait=0s":                 " --wait 0s  must be a positive duration",
		"karmadactl unregister a --cluster-kubeconfig=x --wait=-1s":                " --wait -1s  must be a positive duration, e.g. 1m0s ",
		"karmadactl unregister a --cluster-kubeconfig=/missing":                    "failed to get unregistering cluster config. error: stat /missing",
		"karmadactl token nonsense":                                                `unknown command "nonsense"`,
		"karmadactl token delete":                                                  "missing subcommand; 'token delete' is missing token of form",
		"karmadactl token create --ttl=-1s":                                        "--ttl: -1s must not be negative",
		"karmadactl token create --cluster-name=A":                                 "--cluster-name: invalid cluster name(A)",
		"karmadactl token create --cluster-name=rbac-generator":                    "--cluster-name: invalid cluster name(rbac-generator)",
		"karmadactl token create extra":                                            "unknown command",
		"karmadactl token create --print-register-command":                         "failed to get register command, err: no kubeconfig found",
		"karmadactl token create --print-register-command --kubeconfig=" + several: "failed to get register command, err: no CA certificates found in kubeconfig",
		"karmadactl token create --print-register-command --karmada-context=b --kubeconfig=" + several: `failed to get register command, err: the server "http://127.0.0.1:1" of the kubeconfig is not https://`,
		"karmadactl token create --print-register-command --karmada-context=c --kubeconfig=" + several: `failed to get register command, err: failed to get default cluster config: the kubeconfig has no context "c"`,
		"karmadactl token list -o yaml":                                     `--output: "yaml" is not supported`,
		"karmadactl register":                                               "exactly one argument is allowed",
		"karmadactl register a:1 b:2":                                       "exactly one argument is allowed",
		"karmadactl register a:1":                                           "token is required",
		"karmadactl register a:1 --token=abcdef.0123456789abcdef":           "need to verify CACertHashes, or set --discovery-token-unsafe-skip-ca-verification=true",
		"towline register a:1":                                              "token is required",
		"karmadactl register a:1 " + token + " --discovery-timeout=0s":      "--discovery-timeout: 0s is not a positive duration",
		"karmadactl register a:1 " + token + " --discovery-timeout=-1s":     "--discovery-timeout: -1s is not a positive duration",
		"karmadactl register a:1 " + token + " --karmada-agent-replicas=0":  "--karmada-agent-replicas: 0 is less than 1",
		"karmadactl register a:1 " + token + " --karmada-agent-replicas=-1": "--karmada-agent-replicas: -1 is less than 1",
		"karmadactl register a:1 " + token + " --renew --cluster-zones=a":   "--cluster-zones: --renew replaces only the certificate",
		"karmadactl register a:1 " + token + " --cluster-name=A":            "--cluster-name: invalid cluster name(A)",
		"karmadactl register a:1 " + token:                                  "no current-context",
		"karmadactl register a:1 " + token + " --kubeconfig=" + several:     "kind_a",
		"karmada-agent --cluster-name=c":                                    "load the config of the agent's own cluster; pass --kubeconfig",
		"karmada-agent --kubeconfig=x":                                      "--cluster-name is required",
	} {
		got := run(t, strings.Fields(args)...)
		if got.code != 1 || got.out != "" {
			t.Errorf("%s: got code %d and output %q, want 1 and none", args, got.code, got.out)
		}
		if !strings.HasPrefix(got.err, "error: ") || !strings.Contains(got.err, want) || strings.Count(got.err, "\n") != 1 {
			t.Errorf("%s: got error output %q, want one line with %q", args, got.err, want)
		}
	}
}

// TestTokenCommands makes, lists and deletes tokens.
func TestTokenCommands(t *testing.T) {
	plane := localkube.Shared(t)
	t.Setenv("KUBECONFIG", plane.Kubeconfig)
	loaded, err := clientcmd.LoadFromFile(plane.Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	pin := ""
	for _, cluster := range loaded.Clusters {
		block, _ := pem.Decode(cluster.CertificateAuthorityData)
		ca, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(ca.RawSubjectPublicKeyInfo)
		pin = "sha256:" + hex.EncodeToString(sum[:])
	}
	address := strings.TrimPrefix(plane.Config.Host, "https://")
	for args, want := range map[string]string{
		"karmadactl token create":                                                      `^[a-z0-9]{6}\.[a-z0-9]{16}\n$`,
		"karmadactl token create --print-register-command":                             `^karmadactl register ` + address + ` --token [a-z0-9]{6}\.[a-z0-9]{16} --discovery-token-ca-cert-hash ` + pin + "\n$",
		"kubectl-karmada token create --print-register-command":                        "^kubectl karmada register " + address + " --token ",
		"towline token create --print-register-command":                                "^towline register " + address + " --token ",
		"karmadactl token create --print-register-command --cluster-name=eu-1 --ttl=0": pin + " --cluster-name eu-1 --renew\n$",
	} {
		got := run(t, strings.Fields(args)...)
		if got.code != 0 || got.err != "" || !regexp.MustCompile(want).MatchString(got.out) {
			t.Errorf("%s: got %+v, want %s", args, got, want)
		}
	}
	token := strings.TrimSpace(run(t, "karmadactl", "token", "create", "--ttl=0", "--description=for shops").out)
	list := run(t, "karmadactl", "token", "list")
	row := regexp.MustCompile(regexp.QuoteMeta(token) + ` +<forever> +<never> +authentication,signing +for shops +system:bootstrappers:karmada:default-cluster-token\n`)
	if list.code != 0 || !strings.HasPrefix(list.out, "TOKEN ") || !row.MatchString(list.out) {
		t.Errorf("token list: got %+v, want %s", list, row)
	}
	if got := run(t, "karmadactl", "token", "list", "-o", "json"); !strings.Contains(got.out, `"token": "`+token+`"`) {
		t.Errorf("token list -o json: got %+v", got)
	}
	id, _, _ := strings.Cut(token, ".")
	second := strings.TrimSpace(run(t, "karmadactl", "token", "create").out)
	want := result{out: fmt.Sprintf("bootstrap token %q deleted\nbootstrap token %q deleted\n", id, second[:6])}
	if got := run(t, "karmadactl", "token", "delete", id, second); got != want {
		t.Errorf("token delete: got %+v, want %+v", got, want)
	}
	if got := run(t, "karmadactl", "token", "delete", id); got.code != 1 || !strings.Contains(got.err, "error: delete bootstrap token") {
		t.Errorf("token delete, again: got %+v", got)
	}
}

// TestVerbosityOfKarmadactl shows that -v logs requests without secrets.
func TestVerbosityOfKarmadactl(t *testing.T) {
	plane := localkube.Shared(t)
	t.Setenv("KUBECONFIG", plane.Kubeconfig)
	token := strings.TrimSpace(run(t, "karmadactl", "token", "create").out)
	if got := run(t, "karmadactl", "token", "list", "-v=9"); got.code != 0 || !strings.Contains(got.err, "/api/v1/namespaces/kube-system/secrets") || strings.Contains(got.err, token[7:]) {
		t.Errorf("token list -v=9: got error output\n%s\nwant the request, and not the token", got.err)
	}
}
