package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/towline/towline/internal/phase"
)

// gitSSH is a gitConnection over SSH.
type gitSSH struct {
	*remoteRequest

	conn    net.Conn
	client  *ssh.Client
	session *ssh.Session
	stdin   io.WriteCloser
	stdout  io.Reader
}

// dialGit connects to the service git-upload-pack of a repository. It fails before the login if the key of the host is
// not in known_hosts of the Secret.
func (r *remoteRequest) dialGit(ctx context.Context, repository *url.URL) (gitConnection, error) {
	signer, err := r.signer()
	if err != nil {
		return nil, err
	}
	host := net.JoinHostPort(repository.Hostname(), cmp.Or(repository.Port(), "22"))
	keys, err := parseKnownHosts(r.login.KnownHosts, host)
	if err != nil {
		return nil, r.secretError(err)
	}
	conn, err := r.egress.Dial(ctx, &net.Dialer{Timeout: dialTimeout}, "tcp", host)
	if err != nil {
		return nil, stableError(err)
	}
	connection := &gitSSH{remoteRequest: r, conn: conn}
	var hostKeyErr error
	config := &ssh.ClientConfig{
		User: cmp.Or(repository.User.Username(), "git"), Auth: []ssh.AuthMethod{ssh.PublicKeys(signer)},
		HostKeyAlgorithms: keys.algorithms(),
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			if !keys.contains(key) {
				hostKeyErr = fmt.Errorf("the host key of %s (%s) is not in known_hosts of Secret %s/%s", host, ssh.FingerprintSHA256(key),
					r.reference.Namespace, r.reference.Name)
			}
			return hostKeyErr
		},
	}
	if err := connection.open(host, repository.Path, config); err != nil {
		connection.close()
		return nil, cmp.Or(hostKeyErr, err)
	}
	context.AfterFunc(ctx, connection.close)
	return connection, nil
}

func (g *gitSSH) open(host, path string, config *ssh.ClientConfig) error {
	if err := g.extendDeadline(); err != nil {
		return stableError(err)
	}
	counted := countedConn{Conn: g.conn, counted: g.download.reader(g.conn)}
	connected, channels, requests, err := ssh.NewClientConn(counted, host, config)
	if err != nil {
		return sshError(err)
	}
	g.client = ssh.NewClient(connected, channels, requests)
	if g.session, err = g.client.NewSession(); err == nil {
		g.stdin, err = g.session.StdinPipe()
	}
	if err == nil {
		g.stdout, err = g.session.StdoutPipe()
	}
	if err == nil {
		// This is Git's own quoting of the path.
		err = g.session.Start(gitService + " '" + strings.NewReplacer("'", `'\''`, "!", `'\!'`).Replace(path) + "'")
	}
	if err != nil {
		return sshError(err)
	}
	return nil
}

// countedConn is a net.Conn whose Read counts the bytes.
type countedConn struct {
	net.Conn

	counted io.Reader
}

// Read implements net.Conn.
func (c countedConn) Read(buffer []byte) (int, error) { return c.counted.Read(buffer) }

// sshError returns the error of a connection without text of the server.
func sshError(err error) error {
	if isNetworkError(err) {
		return stableError(err)
	}
	if strings.Contains(err.Error(), "unable to authenticate") {
		return errors.New("the SSH server refused the key of the Secret")
	}
	return errors.New("the SSH connection failed")
}

// extendDeadline sets the deadline of the connection for the next request.
func (g *gitSSH) extendDeadline() error {
	return g.conn.SetDeadline(time.Now().Add(g.timeout))
}

func (g *gitSSH) advertisement(context.Context) (io.ReadCloser, error) {
	return io.NopCloser(g.stdout), nil
}

func (g *gitSSH) request(_ context.Context, body []byte) (io.ReadCloser, error) {
	if err := g.extendDeadline(); err != nil {
		return nil, stableError(err)
	}
	if _, err := g.stdin.Write(body); err != nil {
		return nil, gitError(err)
	}
	return io.NopCloser(g.stdout), nil
}

func (g *gitSSH) close() {
	// This ends the session. The only error is that the connection is already closed.
	_ = g.conn.Close()
}

// signer returns the SSH key of the login. All errors are phase.TerminalError.
func (r *remoteRequest) signer() (ssh.Signer, error) {
	if len(r.login.Identity) == 0 || len(r.login.KnownHosts) == 0 {
		return nil, r.secretError(fmt.Errorf("the keys %s and %s are required for git+ssh", keyIdentity, keyKnownHosts))
	}
	signer, err := ssh.ParsePrivateKey(r.login.Identity)
	if _, isEncrypted := errors.AsType[*ssh.PassphraseMissingError](err); isEncrypted {
		signer, err = ssh.ParsePrivateKeyWithPassphrase(r.login.Identity, []byte(r.login.Password))
	}
	if err != nil {
		return nil, r.secretError(fmt.Errorf("the key %s is not a private key, or needs another password", keyIdentity))
	}
	return signer, nil
}

func (r *remoteRequest) secretError(err error) error {
	return phase.TerminalErrorf("Secret %s/%s: %w", r.reference.Namespace, r.reference.Name, err)
}

// hostKeys are the keys of one host.
type hostKeys []ssh.PublicKey

func (k hostKeys) contains(key ssh.PublicKey) bool {
	return slices.ContainsFunc(k, func(known ssh.PublicKey) bool { return string(known.Marshal()) == string(key.Marshal()) })
}

// algorithms returns all host key algorithms. The algorithms of the keys are first, since a server has keys of several
// types and sends the first that the client accepts.
func (k hostKeys) algorithms() []string {
	var preferred []string
	for _, key := range k {
		if key.Type() == ssh.KeyAlgoRSA {
			preferred = append(preferred, ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256)
		} else {
			preferred = append(preferred, key.Type())
		}
	}
	for _, algorithm := range ssh.SupportedAlgorithms().HostKeys {
		if !slices.Contains(preferred, algorithm) && !strings.Contains(algorithm, "-cert-") {
			preferred = append(preferred, algorithm)
		}
	}
	return preferred
}
