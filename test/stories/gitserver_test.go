package stories

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// gitServer serves the repository repo.git with the programs of Git: by https with a password, and by SSH with a key.
type gitServer struct {
	*httptest.Server

	t          *testing.T
	root       string
	packs      atomic.Int64 // packs that were sent by https
	ssh        net.Listener
	sshAddress string
	// identity is the private key of a user. knownHosts is the public key of the SSH server, in known_hosts format.
	identity, knownHosts string
}

// gitPassword is the password of the user me.
const gitPassword = remoteToken

func newGitServer(t *testing.T) *gitServer {
	t.Helper()
	s := &gitServer{t: t, root: t.TempDir()}
	s.git("init", "--quiet", "--bare", "--initial-branch=main", "repo.git")
	s.git("clone", "--quiet", "repo.git", "work")
	s.git("-C", "work", "checkout", "--quiet", "-B", "main")
	backend := &cgi.Handler{
		Path: filepath.Join(s.git("--exec-path"), "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + s.root, "GIT_HTTP_EXPORT_ALL=1"},
	}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		if user, password, _ := in.BasicAuth(); user != "me" || password != gitPassword {
			w.Header().Set("WWW-Authenticate", "Basic")
			http.Error(w, "text of the server", http.StatusUnauthorized)
			return
		}
		if in.Method == http.MethodPost {
			s.packs.Add(1)
		}
		backend.ServeHTTP(w, in)
	}))
	t.Cleanup(s.Close)
	s.serveSSH()
	return s
}

// git runs Git in the directory of the server, without the Git configuration of the machine.
func (s *gitServer) git(args ...string) string {
	s.t.Helper()
	command := s.command(args...)
	out, err := command.CombinedOutput()
	if err != nil {
		s.t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func (s *gitServer) command(args ...string) *exec.Cmd {
	command := exec.CommandContext(s.t.Context(), "git", args...)
	command.Dir = s.root
	command.Env = append(os.Environ(), "HOME="+s.root, "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	return command
}

// push is pushFiles for one file.
func (s *gitServer) push(name, text string) string {
	s.t.Helper()
	return s.pushFiles(map[string]string{name: text})
}

// pushFiles commits files on a branch, pushes it with all tags, and returns the hash of the commit.
func (s *gitServer) pushFiles(files map[string]string) string {
	s.t.Helper()
	for name, text := range files {
		path := filepath.Join(s.root, "work", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			s.t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			s.t.Fatal(err)
		}
	}
	s.git("-C", "work", "add", "--all")
	s.git("-C", "work", "commit", "--quiet", "--message", "a")
	s.git("-C", "work", "push", "--quiet", "--tags", "origin", "HEAD")
	return s.git("-C", "work", "rev-parse", "HEAD")
}

// newKey returns a new private key in PEM, with its signer.
func (s *gitServer) newKey() (string, ssh.Signer) {
	s.t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		s.t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(pem.EncodeToMemory(block)), signer
}

// serveSSH starts the SSH server, which accepts the user git with the key identity.
func (s *gitServer) serveSSH() {
	s.t.Helper()
	identity, user := s.newKey()
	_, host := s.newKey()
	config := &ssh.ServerConfig{PublicKeyCallback: func(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
		if meta.User() != "git" || string(key.Marshal()) != string(user.PublicKey().Marshal()) {
			return nil, errors.New("unknown key")
		}
		return &ssh.Permissions{}, nil
	}}
	config.AddHostKey(host)
	listener, err := (&net.ListenConfig{}).Listen(s.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.ssh, s.sshAddress, s.identity = listener, listener.Addr().String(), identity
	s.knownHosts = knownhosts.Line([]string{s.sshAddress}, host.PublicKey())
	var connections sync.WaitGroup
	s.t.Cleanup(func() {
		_ = listener.Close()
		connections.Wait()
	})
	connections.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return // it is closed
			}
			connections.Go(func() {
				s.serveConnection(connection, config)
				_ = connection.Close()
			})
		}
	})
}

func (s *gitServer) serveConnection(connection net.Conn, config *ssh.ServerConfig) {
	_, channels, requests, err := ssh.NewServerConn(connection, config)
	if err != nil {
		return // a client that does not trust the server, or has a wrong key
	}
	go ssh.DiscardRequests(requests)
	for opened := range channels {
		channel, sessionRequests, err := opened.Accept()
		if err != nil {
			return
		}
		for request := range sessionRequests {
			if request.Type == "exec" {
				_ = request.Reply(true, nil)
				s.runCommand(channel, string(request.Payload[4:]))
				return
			}
			_ = request.Reply(false, nil)
		}
	}
}

// runCommand runs git-upload-pack for a path below the directory of the server.
func (s *gitServer) runCommand(channel ssh.Channel, line string) {
	path, isUploadPack := strings.CutPrefix(line, "git-upload-pack '/")
	if !isUploadPack {
		return
	}
	command := s.command("upload-pack", strings.TrimSuffix(path, "'"))
	command.Stdin, command.Stdout = channel, channel
	_ = command.Run() // the client closes the connection when it has the pack
	_, _ = channel.SendRequest("exit-status", false, make([]byte, 4))
	_ = channel.Close()
}

// publicKey returns the public key of a signer in known_hosts format.
func publicKey(signer ssh.Signer) string {
	return strings.Fields(string(ssh.MarshalAuthorizedKey(signer.PublicKey())))[1]
}
