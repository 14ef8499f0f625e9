package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // the format of packs
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/go-git/go-git/v5/plumbing"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
	"k8s.io/utils/clock"

	"github.com/towline/towline/internal/archive"
)

// fetchOnce fetches a URL with a login.
func fetchOnce(t *testing.T, address string, login remoteLogin, timeout time.Duration) (remoteResult, error) {
	t.Helper()
	f := NewRemoteFetcher(nil, clock.RealClock{})
	f.timeout = timeout
	awaitResult, err := f.fetch(context.Background(), &fetchShare{limits: f.limits}, Reference{Kind: KindURL, URL: address, Namespace: "eu", Name: "login"}, login, remoteRevision{})
	if size := f.Size(); size != sizeOf(awaitResult.content) {
		t.Errorf("%d bytes of the download are not freed", size)
	}
	return awaitResult, err
}

func handle(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func TestRedirectsCarryNoCredentialsToOtherHosts(t *testing.T) {
	t.Parallel()
	for name, login := range map[string]remoteLogin{
		"token":    {Token: "secret"},
		"password": {Login: Login{Username: "me", Password: "secret"}},
	} {
		var headers http.Header
		other := handle(t, func(w http.ResponseWriter, in *http.Request) {
			headers = in.Header.Clone()
			if strings.HasSuffix(in.URL.Path, gitReferencePath) {
				w.Header().Set("Content-Type", "application/x-git-upload-pack-advertisement")
			}
			_, _ = w.Write([]byte("a: b"))
		})
		// Another port of the same machine is another host. The standard library does not compare ports.
		server := handle(t, func(w http.ResponseWriter, in *http.Request) {
			http.Redirect(w, in, other+in.URL.Path+"?"+in.URL.RawQuery, http.StatusFound)
		})
		for _, scheme := range []string{"", "git+"} {
			headers = nil
			address := scheme + server + "/repo"
			if scheme == "" {
				address += "?token=secret"
			}
			_, _ = fetchOnce(t, address, login, requestTimeout) // the response is not a Git repository
			if headers == nil || headers.Get("Authorization") != "" || headers.Get("Referer") != "" {
				t.Errorf("%s, %s: the other host got %v", name, address, headers)
			}
		}
	}
}

func TestRedirectsFromHTTPSToHTTPAreRefused(t *testing.T) {
	t.Parallel()
	other := handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("a: b")) })
	server := httptest.NewTLSServer(http.RedirectHandler(other, http.StatusFound))
	t.Cleanup(server.Close)
	login := remoteLogin{Login: Login{CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}}
	_, err := fetchOnce(t, server.URL, login, requestTimeout)
	if err == nil || !strings.Contains(err.Error(), "redirected from https to http") {
		t.Errorf("got %v", err)
	}
}

func TestHostileServers(t *testing.T) {
	t.Parallel()
	const text = "text of the server"
	zeros := bomb(t) // before the request, whose time is limited
	for name, test := range map[string]struct {
		serve   http.HandlerFunc
		timeout time.Duration
		want    string
	}{
		"endless body": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				for chunk := make([]byte, 1<<20); ; {
					if _, err := w.Write(chunk); err != nil {
						return
					}
				}
			},
			want: "it has more than 64 MiB",
		},
		"compressed endless body": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Encoding", "gzip")
				writer := gzip.NewWriter(w)
				for chunk := make([]byte, 1<<20); ; {
					if _, err := writer.Write(chunk); err != nil {
						return
					}
				}
			},
			want: "it has more than 64 MiB",
		},
		"slow body": {
			serve: func(w http.ResponseWriter, in *http.Request) {
				_, _ = w.Write([]byte("a"))
				w.(http.Flusher).Flush()
				<-in.Context().Done()
			},
			timeout: 200 * time.Millisecond,
			want:    "no response in time",
		},
		"no response": {
			serve:   func(_ http.ResponseWriter, in *http.Request) { <-in.Context().Done() },
			timeout: 200 * time.Millisecond,
			want:    "no response in time",
		},
		"error with a text": {
			serve: func(w http.ResponseWriter, _ *http.Request) { http.Error(w, text, http.StatusBadGateway) },
			want:  "the server returned 502 Bad Gateway",
		},
		"not HTTP": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				connection, _, err := http.NewResponseController(w).Hijack()
				if err == nil {
					_, _ = connection.Write([]byte(text + "\r\n\r\n"))
					_ = connection.Close()
				}
			},
			want: "the server returned an invalid response",
		},
		"large header": {
			serve: func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X-Large", strings.Repeat("a", 1<<20)) },
			want:  "exceeded",
		},
		"HTML": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte("\n<!doctype html><p>" + text))
			},
			want: "the server returned HTML",
		},
		"redirects without end": {
			serve: func(w http.ResponseWriter, in *http.Request) { http.Redirect(w, in, in.URL.Path, http.StatusFound) },
			want:  "more than 10 times",
		},
		"redirect to a scheme": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Location", "text-of-the-server://a")
				w.WriteHeader(http.StatusFound)
			},
			want: "redirected to a URL with neither http nor https",
		},
		"archive of zeros": {
			serve: func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(zeros) },
			want:  "its files have more than 100 MiB",
		},
		"empty archive": {
			serve: func(w http.ResponseWriter, _ *http.Request) {
				zipped := gzip.NewWriter(w)
				_ = tar.NewWriter(zipped).Close()
				_ = zipped.Close()
			},
			want: "it has no files",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.timeout == 0 {
				test.timeout = requestTimeout
			}
			_, err := fetchOnce(t, handle(t, test.serve), remoteLogin{}, test.timeout)
			if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), text) {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}

// bomb returns a tar.gz archive of 200 MiB of zeros.
func bomb(t *testing.T) []byte {
	t.Helper()
	var raw bytes.Buffer
	zipped := gzip.NewWriter(&raw)
	archived := tar.NewWriter(zipped)
	const size = 200 << 20
	if err := archived.WriteHeader(&tar.Header{Name: "a.yaml", Size: size, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	for range size >> 20 {
		if _, err := archived.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	if err := zipped.Close(); err != nil {
		t.Fatal(err)
	}
	return raw.Bytes()
}

func TestSSHServerThatDoesNotRespond(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // the test ends
	known := fmt.Sprintf("%s ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEuKFp7jR/d7bIvjRsNwDZYxUF8Hwxsn0nQnj1xg4JNL", listener.Addr())
	identity := newTestIdentity(t)
	login := remoteLogin{Identity: identity, KnownHosts: []byte(known)}
	_, err = fetchOnce(t, "git+ssh://git@"+listener.Addr().String()+"/repo", login, 200*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("got %v", err)
	}
	for _, login := range []remoteLogin{{Identity: identity}, {KnownHosts: []byte(known)}} {
		_, err = fetchOnce(t, "git+ssh://git@"+listener.Addr().String()+"/repo", login, time.Second)
		if err == nil || !strings.Contains(err.Error(), "Secret eu/login: the keys identity and known_hosts are required") {
			t.Errorf("got %v", err)
		}
	}
}

func TestSSHServerWithAnotherHostKeyGetsNoLogin(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hostKey, otherKey := newTestSigner(t), newTestSigner(t)
	logins := make(chan string, 2)
	go func() {
		defer close(logins)
		for range 2 {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			config := &ssh.ServerConfig{PublicKeyCallback: func(meta ssh.ConnMetadata, _ ssh.PublicKey) (*ssh.Permissions, error) {
				logins <- meta.User()
				return nil, errors.New("unknown key")
			}}
			config.AddHostKey(hostKey)
			_, _, _, _ = ssh.NewServerConn(connection, config) // fails: there is no valid key
			_ = connection.Close()
		}
	}()
	address := listener.Addr().String()
	login := remoteLogin{Identity: newTestIdentity(t), KnownHosts: []byte(knownhosts.Line([]string{address}, otherKey.PublicKey()))}
	_, err = fetchOnce(t, "git+ssh://"+address+"/repo", login, requestTimeout)
	want := "the host key of " + address + " (" + ssh.FingerprintSHA256(hostKey.PublicKey()) + ") is not in known_hosts of Secret eu/login"
	if err == nil || err.Error() != want || len(logins) != 0 {
		t.Errorf("got %v, want %s; %d logins", err, want, len(logins))
	}
	login.KnownHosts = []byte(knownhosts.Line([]string{address}, hostKey.PublicKey()))
	_, err = fetchOnce(t, "git+ssh://"+address+"/repo", login, requestTimeout)
	if err == nil || err.Error() != "the SSH server refused the key of the Secret" || <-logins != "git" {
		t.Errorf("with the right host key: %v", err)
	}
	if err := listener.Close(); err != nil {
		t.Error(err)
	}
}

// entry is one object in a pack.
type entry struct {
	kind plumbing.ObjectType
	// length is the length in the header.
	length int
	data   []byte
}

// packOf returns a pack of entries.
func packOf(entries ...entry) []byte {
	raw := append([]byte("PACK\x00\x00\x00\x02"), binary.BigEndian.AppendUint32(nil, uint32(len(entries)))...)
	for _, e := range entries {
		first, rest := byte(e.kind)<<4|byte(e.length&0xf), e.length>>4
		for rest > 0 {
			raw = append(raw, first|0x80)
			first, rest = byte(rest&0x7f), rest>>7
		}
		raw = append(raw, first)
		if e.kind == plumbing.REFDeltaObject {
			raw = append(raw, make([]byte, 20)...)
		}
		var compressed bytes.Buffer
		writer := zlib.NewWriter(&compressed)
		_, _ = writer.Write(e.data)
		_ = writer.Close()
		raw = append(raw, compressed.Bytes()...)
	}
	sum := sha1.Sum(raw) //nolint:gosec // the format of packs
	return append(raw, sum[:]...)
}

func TestHostilePacks(t *testing.T) {
	t.Parallel()
	limits := archive.Limits{Files: 100, Size: 1 << 20}
	large := make([]byte, 600<<10)
	for name, test := range map[string]struct {
		pack []byte
		want string
	}{
		"large object":         {packOf(entry{plumbing.BlobObject, 2 << 20, make([]byte, 2<<20)}), "the Git repository has more than 1 MiB"},
		"large in sum":         {packOf(entry{plumbing.BlobObject, len(large), large}, entry{plumbing.BlobObject, len(large), large}), "the Git repository has more than 1 MiB"},
		"larger than it says":  {packOf(entry{plumbing.BlobObject, 1, large}), "invalid pack"},
		"delta makes too much": {packOf(entry{plumbing.REFDeltaObject, 6, []byte{1, 0xff, 0xff, 0xff, 0x7f, 0}}), "the Git repository has more than 1 MiB"},
		"delta without size":   {packOf(entry{plumbing.REFDeltaObject, 1, []byte{0x80}}), "invalid pack"},
		"many objects":         {append([]byte("PACK\x00\x00\x00\x02"), 0x7f, 0xff, 0xff, 0xff), "more than 400 objects"},
		"not a pack":           {[]byte("text"), "invalid pack"},
	} {
		if _, err := checkPack(test.pack, limits); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", name, err, test.want)
		}
	}
	if size, err := checkPack(packOf(entry{plumbing.BlobObject, len(large), large}), limits); err != nil || size != int64(len(large)) {
		t.Errorf("a good pack: %d bytes, %v", size, err)
	}
}

// TestTreeWithManyPaths reads a tree of few objects with more paths than fit on any disk.
func TestTreeWithManyPaths(t *testing.T) {
	t.Parallel()
	hash := func(kind plumbing.ObjectType, data []byte) []byte {
		sum := plumbing.ComputeHash(kind, data)
		return sum[:]
	}
	blob := []byte("a: b")
	entries := []entry{{plumbing.BlobObject, len(blob), blob}}
	below, mode := hash(plumbing.BlobObject, blob), "100644"
	for range 12 {
		var tree []byte
		for name := range 10 {
			tree = append(fmt.Appendf(tree, "%s %d\x00", mode, name), below...)
		}
		entries = append(entries, entry{plumbing.TreeObject, len(tree), tree})
		below, mode = hash(plumbing.TreeObject, tree), "40000"
	}
	commit := fmt.Appendf(nil, "tree %x\nauthor a <a> 1 +0000\ncommitter a <a> 1 +0000\n\na", below)
	entries = append(entries, entry{plumbing.CommitObject, len(commit), commit})
	_, err := filesInPack(packOf(entries...), plumbing.ComputeHash(plumbing.CommitObject, commit), "", func(int64) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "more than 50000 files") {
		t.Errorf("got %v", err)
	}
	files, err := filesInPack(packOf(entries...), plumbing.ComputeHash(plumbing.CommitObject, commit), "1/1/1/1/1/1/1/1/1/1/1", func(int64) error { return nil })
	if err != nil || len(files) != 10 {
		t.Errorf("a small directory of the tree: %d files, %v", len(files), err)
	}
}

// A directory of 17 MiB has 700,000 entries, which need a multiple of this memory after they are decoded.
func TestLargeTree(t *testing.T) {
	t.Parallel()
	tree := bytes.Repeat(append([]byte("1 a\x00"), make([]byte, 20)...), 700_000)
	commit := fmt.Appendf(nil, "tree %s\nauthor a <a> 1 +0000\ncommitter a <a> 1 +0000\n\na", plumbing.ComputeHash(plumbing.TreeObject, tree))
	pack := packOf(entry{plumbing.TreeObject, len(tree), tree}, entry{plumbing.CommitObject, len(commit), commit})
	_, err := filesInPack(pack, plumbing.ComputeHash(plumbing.CommitObject, commit), "a", func(int64) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "a directory of the Git repository has more than 50000 files") {
		t.Errorf("got %v", err)
	}
}

// TestUnpackedContentIsReserved fetches a small archive with large unpacked content.
func TestUnpackedContentIsReserved(t *testing.T) {
	t.Parallel()
	raw := bomb(t)
	server := handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(raw) })
	f := NewRemoteFetcher(nil, clock.RealClock{})
	f.limits.total = 3 << 20
	_, err := f.fetch(t.Context(), &fetchShare{limits: f.limits}, Reference{Kind: KindURL, URL: server}, remoteLogin{}, remoteRevision{})
	// Without the reservation, the fetch fails at the limit of one archive.
	if want := `read archive: "a.yaml": the content of all URLs has more than 3 MiB`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if size := f.Size(); size != 0 {
		t.Errorf("%d bytes are not freed", size)
	}
	blob := make([]byte, 1<<20)
	_, err = filesInPack(packOf(entry{plumbing.BlobObject, len(blob), blob}), plumbing.Hash{}, "", func(n int64) error {
		if n != int64(len(blob)) {
			t.Errorf("%d bytes of a pack are reserved, want %d", n, len(blob))
		}
		return errors.New("no room")
	})
	if err == nil || err.Error() != "no room" {
		t.Errorf("a pack: got %v", err)
	}
}

func TestKnownHosts(t *testing.T) {
	t.Parallel()
	const key = " ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEuKFp7jR/d7bIvjRsNwDZYxUF8Hwxsn0nQnj1xg4JNL\n"
	for line, want := range map[string]bool{
		"host.example.com" + key:                      true,
		"# a comment\n\nother,host.example.com" + key: true,
		"*.example.com" + key:                         true,
		"*.example.com,!host.example.com" + key:       false,
		"[host.example.com]:22" + key:                 false,
		"[host.example.com]:2222" + key:               false,
		"other.example.com" + key:                     false,
		"@cert-authority host.example.com" + key:      false,
		"host.example.com" + key + "@revoked *" + key: false,
		"|1|AAAA|BBBB" + key:                          false,
		hashedHost("host.example.com") + key:          true,
		hashedHost("other.example.com") + key:         false,
	} {
		keys, err := parseKnownHosts([]byte(line), "host.example.com:22")
		if err != nil || len(keys) > 0 != want {
			t.Errorf("%q: %d keys, error %v", line, len(keys), err)
		}
	}
	if keys, err := parseKnownHosts([]byte("[host.example.com]:2222"+key), "host.example.com:2222"); err != nil || len(keys) != 1 {
		t.Errorf("another port: %d keys, error %v", len(keys), err)
	}
	if _, err := parseKnownHosts([]byte("host.example.com ssh-ed25519 text"), "host.example.com:22"); err == nil {
		t.Error("an invalid file is accepted")
	}
}

func TestGitErrorsHaveNoTextsOfTheServer(t *testing.T) {
	t.Parallel()
	address := handle(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/x-git-upload-pack-advertisement")
		_, _ = io.WriteString(w, "001e# service=git-upload-pack\n0000000eERR secret0000")
	})
	_, err := fetchOnce(t, "git+"+address, remoteLogin{}, requestTimeout)
	if err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("got %v", err)
	}
	plain := handle(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "secret") })
	if _, err = fetchOnce(t, "git+"+plain, remoteLogin{}, requestTimeout); err == nil || err.Error() != "the server returned no list of Git references" {
		t.Errorf("got %v", err)
	}
}

func newTestSigner(t *testing.T) ssh.Signer {
	t.Helper()
	signer, err := ssh.ParsePrivateKey(newTestIdentity(t))
	if err != nil {
		t.Fatal(err)
	}
	return signer
}

// newTestIdentity returns a new private key in PEM.
func newTestIdentity(t *testing.T) []byte {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(key, "")
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(block)
}

// hashedHost returns the hash of a host in the format of known_hosts.
func hashedHost(host string) string { return knownhosts.HashHostname(knownhosts.Normalize(host)) }
