package stories

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// gitKustomization deploys a kustomization of a Git repository.
const gitKustomization = `
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: kustomize}
spec:
  clusterSelector: {matchLabels: {env: remote}}
  kustomizationRefs:
  - {remoteURL: {url: "%s", interval: 1s, secretRef: {namespace: default, name: git-key}}, path: kustomize}
`

// TestGitWithoutFlux deploys the manifests of a Git repository by https and by SSH, in push and in pull mode. Pushes
// are deployed, tags and commits stay as they are, an SSH server with another host key is refused, and the end of a
// server changes no deployed object.
func TestGitWithoutFlux(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := w.startRemoteMembers()
	server := newGitServer(t)
	w.gitSecrets(server)
	const password = ", secretRef: {namespace: default, name: git-password}"
	const key = ", secretRef: {namespace: default, name: git-key}"
	byHTTPS, bySSH := "git+"+server.URL+"/repo.git", "git+ssh://git@"+server.sshAddress+"/repo.git"

	tree := func(text string) string {
		all := ""
		for _, name := range []string{"branch", "tag", "commit", "ssh"} {
			server.git("-C", "work", "checkout", "--quiet", "main")
			all = server.push(name+"/objects.yaml", remoteMap(name, text))
		}
		return all
	}
	server.push("README.md", "not a manifest")
	first := tree("one")
	server.git("-C", "work", "tag", "--annotate", "--message", "a", "v1.0.0")
	server.push("README.md", "the tag is pushed")
	server.pushFiles(map[string]string{"kustomize/kustomization.yaml": "resources: [objects.yaml]", "kustomize/objects.yaml": remoteMap("kustomize", "one")})
	w.createRemoteProfile("branch", byHTTPS+"?ref=main&path=branch", password)
	w.createRemoteProfile("tag", byHTTPS+"?ref=v1.0.0&path=tag", password)
	w.createRemoteProfile("commit", byHTTPS+"?ref="+first+"&path=commit", password)
	w.createRemoteProfile("ssh", bySSH+"?path=ssh", key)
	w.apply(w.hub, fmt.Sprintf(gitKustomization, bySSH))
	for _, name := range []string{"branch", "tag", "commit", "ssh", "kustomize"} {
		w.awaitRemoteText(members, name, "one")
		w.awaitAllProvisioned(members, name)
	}
	if got := server.packs.Load(); got != 3 {
		t.Errorf("%d packs were sent by https, want 3: one for each profile, for all clusters", got)
	}

	tree("two")
	w.awaitRemoteText(members, "branch", "two")
	w.awaitRemoteText(members, "ssh", "two")
	server.push("kustomize/objects.yaml", remoteMap("kustomize", "two"))
	w.awaitRemoteText(members, "kustomize", "two")
	w.awaitRemoteText(members, "tag", "one")
	w.awaitRemoteText(members, "commit", "one")

	w.gitBadInput(members, server, byHTTPS, bySSH)

	before := w.remoteFingerprints(members)
	if err := server.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	server.CloseClientConnections()
	w.awaitFailures(members, "branch", "URL "+byHTTPS, "ref=main")
	server.push("ssh/objects.yaml", remoteMap("ssh", "three"))
	w.awaitRemoteText(members, "ssh", "three")
	after := w.remoteFingerprints(members)
	for cluster := range members {
		delete(before[cluster], "ConfigMap ssh")
		delete(after[cluster], "ConfigMap ssh")
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("deployed objects (-before +after):\n%s", diff)
	}

	before = w.remoteFingerprints(members)
	if err := server.ssh.Close(); err != nil {
		t.Fatal(err)
	}
	for profile, query := range map[string]string{"ssh": "?path=ssh", "kustomize": ""} {
		w.awaitFailures(members, profile, "URL git+ssh://"+server.sshAddress+"/repo.git"+query+": ", "connection refused")
	}
	if diff := cmp.Diff(before, w.remoteFingerprints(members)); diff != "" {
		t.Errorf("deployed objects after the end of the SSH server (-before +after):\n%s", diff)
	}
}

// gitSecrets creates the Secrets with valid and invalid logins.
func (w *world) gitSecrets(server *gitServer) {
	w.t.Helper()
	w.createSecret("git-password", map[string]string{"username": "me", "password": gitPassword, "caFile": certificatePEM(server.Server)})
	w.createSecret("git-wrong-password", map[string]string{"username": "me", "password": "wrong", "caFile": certificatePEM(server.Server)})
	w.createSecret("git-key", map[string]string{"identity": server.identity, "known_hosts": server.knownHosts})
	otherKey, other := server.newKey()
	w.createSecret("git-wrong-key", map[string]string{"identity": otherKey, "known_hosts": server.knownHosts})
	host := server.sshAddress[:len("127.0.0.1")]
	w.createSecret("git-wrong-host", map[string]string{
		"identity":    server.identity,
		"known_hosts": fmt.Sprintf("[%s]%s ssh-ed25519 %s", host, server.sshAddress[len(host):], publicKey(other)),
	})
	w.createSecret("git-no-host", map[string]string{"identity": server.identity})
}

// gitBadInput makes mistakes in profiles. Each mistake is reported by name.
func (w *world) gitBadInput(members remoteMembers, server *gitServer, byHTTPS, bySSH string) {
	w.t.Helper()
	for name, test := range map[string]struct {
		url, secret string
		names       []string
	}{
		"no-branch":      {byHTTPS + "?ref=none", "git-password", []string{`the branch or tag "none" does not exist`}},
		"no-directory":   {byHTTPS + "?path=none", "git-password", []string{`the directory "none" does not exist`}},
		"no-repository":  {byHTTPS + "-none", "git-password", []string{"404 Not Found"}},
		"wrong-password": {byHTTPS, "git-wrong-password", []string{"401 Unauthorized"}},
		"wrong-key":      {bySSH, "git-wrong-key", []string{"the SSH server refused the key of the Secret"}},
		"wrong-host":     {bySSH, "git-wrong-host", []string{"the host key of " + server.sshAddress, "is not in known_hosts of Secret default/git-wrong-host"}},
		"no-host":        {bySSH, "git-no-host", []string{"Secret default/git-no-host", "identity and known_hosts are required"}},
	} {
		w.createRemoteProfile(name, test.url, ", secretRef: {namespace: default, name: "+test.secret+"}")
		w.awaitFailures(members, name, append(test.names, "URL git+")...)
	}
}
