package source_test

import (
	"net/http"
	"net/http/cgi"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// gitServer serves the repository repo.git with Git's own server program.
type gitServer struct {
	t         *testing.T
	root      string
	url       string
	fetches   atomic.Int64 // requests for a pack
	forbidden atomic.Bool
	// authorized counts the requests with credentials.
	authorized atomic.Int64
}

func newGitServer(t *testing.T) *gitServer {
	t.Helper()
	s := &gitServer{t: t, root: t.TempDir()}
	s.git("init", "--quiet", "--bare", "--initial-branch=main", "repo.git")
	s.git("clone", "--quiet", "repo.git", "work")
	s.git("-C", "work", "checkout", "--quiet", "-B", "main")
	path := s.git("--exec-path")
	backend := &cgi.Handler{
		Path: filepath.Join(path, "git-http-backend"),
		Env:  []string{"GIT_PROJECT_ROOT=" + s.root, "GIT_HTTP_EXPORT_ALL=1"},
	}
	server := serveFunc(t, func(w http.ResponseWriter, in *http.Request) {
		if in.Method == http.MethodPost {
			s.fetches.Add(1)
		}
		if in.Header.Get("Authorization") != "" {
			s.authorized.Add(1)
		}
		if s.forbidden.Load() {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		backend.ServeHTTP(w, in)
	})
	s.url = "git+" + server.URL + "/repo.git"
	return s
}

// git runs Git in the directory of the server, without the configuration of the machine.
func (s *gitServer) git(args ...string) string {
	s.t.Helper()
	command := exec.CommandContext(s.t.Context(), "git", args...)
	command.Dir = s.root
	command.Env = append(os.Environ(), "HOME="+s.root, "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.com",
		"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.com")
	out, err := command.CombinedOutput()
	if err != nil {
		s.t.Fatalf("git %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// commit adds files, pushes a commit, and returns its hash.
func (s *gitServer) commit(files map[string]string) string {
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

func TestRemoteReadsGitRepositories(t *testing.T) {
	t.Parallel()
	s := newGitServer(t)
	if err := os.Symlink("/etc/passwd", filepath.Join(s.root, "work", "link.yaml")); err != nil {
		t.Fatal(err)
	}
	first := s.commit(map[string]string{"a.yaml": "one", "deep/b.yaml": "one", "README.md": "text"})
	second := s.commit(map[string]string{"a.yaml": "two"})
	s.git("-C", "work", "tag", "light", first)
	s.git("-C", "work", "tag", "--annotate", "--message", "a", "heavy", second)
	s.git("-C", "work", "checkout", "--quiet", "-b", "feature/x")
	s.commit(map[string]string{"a.yaml": "three"})
	for name, test := range map[string]struct {
		query string
		want  map[string]string
		err   string
	}{
		"default branch": {want: map[string]string{"a.yaml": "two", "deep/b.yaml": "one"}},
		"branch":         {query: "?ref=feature/x", want: map[string]string{"a.yaml": "three", "deep/b.yaml": "one"}},
		"full name":      {query: "?ref=refs/heads/feature/x", want: map[string]string{"a.yaml": "three", "deep/b.yaml": "one"}},
		"tag":            {query: "?ref=light", want: map[string]string{"a.yaml": "one", "deep/b.yaml": "one"}},
		"annotated tag":  {query: "?ref=heavy", want: map[string]string{"a.yaml": "two", "deep/b.yaml": "one"}},
		"commit":         {query: "?ref=" + first, want: map[string]string{"a.yaml": "one", "deep/b.yaml": "one"}},
		"directory":      {query: "?ref=main&path=deep", want: map[string]string{"b.yaml": "one"}},
		"no branch":      {query: "?ref=none", err: `the branch or tag "none" does not exist`},
		"no commit":      {query: "?ref=" + strings.Repeat("1", 40), err: "the commit 1111"},
		"no directory":   {query: "?path=none", err: `the directory "none" does not exist`},
		"no manifest":    {query: "?path=link.yaml", err: "does not exist"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := newRemoteRun(t).read(remoteRef(s.url + test.query))
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) || !strings.Contains(err.Error(), s.url) {
					t.Errorf("got %v, want %s", err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, filesOf(got)); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
	// If a server sends any commit, the hub requests no history.
	s.git("-C", "repo.git", "config", "uploadpack.allowReachableSHA1InWant", "true")
	got, err := newRemoteRun(t).read(remoteRef(s.url + "?ref=" + first))
	if err != nil || filesOf(got)["a.yaml"] != "one" {
		t.Errorf("a commit that no reference points at: %v %v", filesOf(got), err)
	}
}

func TestRemoteFollowsBranches(t *testing.T) {
	t.Parallel()
	s := newGitServer(t)
	first := s.commit(map[string]string{"a.yaml": "one"})
	r := newRemoteRun(t)
	ref := withInterval(remoteRef(s.url+"?ref=main"), time.Minute)
	if _, err := r.read(ref); err != nil {
		t.Fatal(err)
	}
	r.advance(time.Minute)
	eventually(t, r.clock.HasWaiters)
	if got := s.fetches.Load(); got != 1 {
		t.Errorf("%d packs were fetched, want 1: nothing has changed", got)
	}
	s.commit(map[string]string{"a.yaml": "two"})
	r.advance(time.Minute)
	r.awaitChange()
	got, err := r.contents.Manifests(t.Context(), ref, r.tmplCtx)
	if err != nil || filesOf(got)["a.yaml"] != "two" {
		t.Errorf("after a push: %v %v", filesOf(got), err)
	}
	// A commit never changes, so it is not requested again.
	if _, err := r.read(withInterval(remoteRef(s.url+"?ref="+first), time.Minute)); err != nil {
		t.Fatal(err)
	}
	s.forbidden.Store(true)
	r.advance(time.Minute)
	eventually(t, r.clock.HasWaiters)
	r.advance(time.Minute)
	eventually(t, r.clock.HasWaiters)
	if _, err := r.contents.Manifests(t.Context(), remoteRef(s.url+"?ref="+first), r.tmplCtx); err != nil {
		t.Error(err)
	}
}

func TestRemoteGitRedirectsCarryNoCredentials(t *testing.T) {
	t.Parallel()
	s := newGitServer(t)
	s.commit(map[string]string{"a.yaml": "one"})
	var authorized atomic.Int64
	front := serveFunc(t, func(w http.ResponseWriter, in *http.Request) {
		if in.Header.Get("Authorization") != "" {
			authorized.Add(1)
		}
		http.Redirect(w, in, strings.TrimSuffix(strings.TrimPrefix(s.url, "git+"), "/repo.git")+in.URL.Path+"?"+in.URL.RawQuery, http.StatusFound)
	})
	r := newRemoteRun(t)
	r.secrets.set("login", map[string]string{"username": "me", "password": "right"})
	got, err := r.read(withSecret(remoteRef("git+"+front.URL+"/repo.git"), "login"))
	if err != nil || filesOf(got)["a.yaml"] != "one" {
		t.Errorf("got %v %v", filesOf(got), err)
	}
	if authorized.Load() != 1 || s.authorized.Load() != 0 {
		t.Errorf("requests with credentials: %d to the host in the URL, want 1; %d to the other host, want 0", authorized.Load(), s.authorized.Load())
	}
}
