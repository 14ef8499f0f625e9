package source

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/go-git/go-git/v5/plumbing"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	corev1 "k8s.io/api/core/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/test/fuzzing"
)

// The secrets in the seeds of the fuzz targets.
const (
	secretPassword = "pa55w0rd-of-the-url"
	secretValue    = "s3cret-value-of-a-Secret"
)

// hidesCredentials checks that the error about a URL does not contain secretPassword, unless a part of the URL that
// messages show contains it.
func hidesCredentials(t *testing.T, err error, address string) {
	t.Helper()
	if parsed, err := url.Parse(address); err == nil {
		shown := []string{parsed.Scheme, parsed.Host, parsed.Query().Get("path"), parsed.Query().Get("ref")}
		if parsed.Host != "" || !strings.Contains(parsed.Opaque+parsed.Path, "@") {
			shown = append(shown, parsed.Opaque, parsed.Path)
		}
		if strings.Contains(strings.Join(shown, "\n"), secretPassword) {
			return
		}
	}
	fuzzing.HidesSecret(t, err, []byte(address), secretPassword)
}

// FuzzRemoteURL parses URLs of profiles. An accepted URL has no credentials, and each request goes to the host in its
// error message.
func FuzzRemoteURL(f *testing.F) {
	for _, address := range []string{
		"https://example.com/a.yaml?x=1#y", "http://me:" + secretPassword + "@example.com/a", "git+https://example.com/repo.git?ref=v1&path=/apps//web", "git+ssh://git@example.com:22/repo?path=../a",
		"oci://example.com/a/b:v1@sha256:aa", "git+https://example.com/?ref=a&ref=b", "file:///etc/passwd", `https://example.com\@other/`, "https://[::1%25lo]/", "git+ssh://-oProxyCommand=x/a", "git+file:///a", "//example.com", "https://a?token=" + secretPassword, "http://a b/", "https://example.com/%zz",
	} {
		f.Add(address, true)
	}
	f.Fuzz(func(t *testing.T, address string, hasSecret bool) {
		var remote libv1beta1.RemoteSource
		if hasSecret {
			remote.SecretRef = &corev1.SecretReference{Name: "a"}
		}
		shown := redactedRemote(address)
		err := checkRemote(address, remote)
		fuzzing.OneLine(t, err)
		hidesCredentials(t, err, address)
		if err != nil {
			return
		}
		parsed, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		if named, err := url.Parse(shown); err != nil || named.Host != parsed.Host || named.User != nil {
			t.Errorf("%q is shown as %q", address, shown)
		}
		if _, hasPassword := parsed.User.Password(); hasPassword {
			t.Errorf("%q is accepted with a password", address)
		}
		if !isGit(parsed.Scheme) {
			return
		}
		git, err := parseGitAddress(address)
		if err != nil {
			t.Fatal(err)
		}
		if git.url.Host != parsed.Host || git.url.RawQuery != "" || git.directory != "" && !filepath.IsLocal(git.directory) {
			t.Errorf("%q became %+v", address, git)
		}
	})
}

// FuzzDockerConfig reads logins from Secrets. A login is only for the host of the repository.
func FuzzDockerConfig(f *testing.F) {
	auth := base64.StdEncoding.EncodeToString([]byte("me:" + secretValue))
	f.Add([]byte(`{"auths":{"https://index.docker.io/v1/":{"auth":"`+auth+`"},"example.com":{"username":"me","password":"`+secretValue+`"}}}`), "oci://docker.io/a")
	f.Add([]byte(`{"auths":{"example.com:443":{"auth":"`+secretValue+`"}}}`), "https://example.com:443/charts")
	f.Add([]byte(`{"auths":{"":{}}}`), "")
	f.Fuzz(func(t *testing.T, raw []byte, address string) {
		secret := &corev1.Secret{Data: map[string][]byte{corev1.DockerConfigJsonKey: raw}}
		var login Login
		err := login.readCredentials(secret, "", address)
		fuzzing.OneLine(t, err)
		fuzzing.HidesSecret(t, err, raw, secretValue)
		if err != nil || login.Username == "" {
			return
		}
		var config struct{ Auths map[string]json.RawMessage }
		if err := json.Unmarshal(raw, &config); err != nil {
			t.Fatal(err)
		}
		host, err := registryHost(address)
		if err != nil {
			t.Fatal(err)
		}
		for name := range config.Auths {
			if named, err := registryHost(name); err == nil && named == host {
				return
			}
		}
		t.Errorf("a login for %q, which %s does not have", host, raw)
	})
}

// FuzzKnownHosts reads known_hosts of Secrets.
func FuzzKnownHosts(f *testing.F) {
	const key = " ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEuKFp7jR/d7bIvjRsNwDZYxUF8Hwxsn0nQnj1xg4JNL\n"
	f.Add([]byte("example.com,[example.org]:2222"+key), "example.com:22")
	f.Add([]byte("*.com,!bad.com"+key+"@revoked *"+key), "bad.com:22")
	f.Add([]byte("|1|aGk=|aGk="+key), "example.com:22")
	f.Add([]byte("[*]:22"+key+"@cert-authority *"+key), "[::1]:22")
	f.Fuzz(func(t *testing.T, file []byte, address string) {
		fuzzing.Within(t, 64<<20+uint64(len(file))*1000, func() {
			keys, err := parseKnownHosts(file, address)
			fuzzing.OneLine(t, err)
			// Each line has at most one accepted key.
			if lines := strings.Count(string(file), "\n") + 1; len(keys) > lines {
				t.Errorf("%d keys in %d lines", len(keys), lines)
			}
		})
	})
}

// FuzzGitPack reads packs of Git servers: a whole pack, or a pack of a tree, its commit and a delta.
func FuzzGitPack(f *testing.F) {
	blob := []byte("a: b")
	sum := plumbing.ComputeHash(plumbing.BlobObject, blob)
	tree := append([]byte("100644 a.yaml\x00"), sum[:]...)
	f.Add([]byte{}, tree, []byte("author a <a> 1 +0000\ncommitter a <a> 1 +0000\n\na"), []byte{4, 4, 0x90, 4}, "")
	f.Add([]byte{}, append([]byte("40000 ..\x00"), sum[:]...), []byte("\n\n"), []byte{1, 0xff, 0xff, 0xff, 0x7f, 0}, "a/b")
	f.Add([]byte{}, append([]byte("120000 link\x00"), sum[:]...), []byte(""), []byte{}, "..")
	f.Add([]byte("PACK\x00\x00\x00\x02\x7f\xff\xff\xff"), []byte{}, []byte{}, []byte{}, "")
	f.Add(packOf(entry{plumbing.BlobObject, 4, blob}), []byte{}, []byte{}, []byte{}, "")
	limits := archive.DefaultLimits()
	f.Fuzz(func(t *testing.T, pack, tree, rest, delta []byte, directory string) {
		treeHash := plumbing.ComputeHash(plumbing.TreeObject, tree)
		commit := append(fmt.Appendf(nil, "tree %s\n", treeHash), rest...)
		hash := plumbing.ComputeHash(plumbing.CommitObject, commit)
		if len(pack) == 0 {
			pack = packOf(entry{plumbing.BlobObject, len(blob), blob}, entry{plumbing.TreeObject, len(tree), tree},
				entry{plumbing.CommitObject, len(commit), commit}, entry{plumbing.REFDeltaObject, len(delta), delta})
		}
		var files map[string][]byte
		var err error
		// A delta can create an object of the maximum size.
		fuzzing.Within(t, 4*uint64(limits.Size)+uint64(len(pack))*20_000, func() { files, err = filesInPack(pack, hash, directory, func(int64) error { return nil }) })
		fuzzing.OneLine(t, err)
		size := 0
		for name, content := range files {
			size += len(content)
			if !filepath.IsLocal(name) {
				t.Errorf("the path %q is outside of the tree", name)
			}
		}
		if len(files) > limits.Files || int64(size) > limits.Size {
			t.Errorf("%d files of %d bytes", len(files), size)
		}
	})
}

// FuzzChartIndex reads the index of a chart repository.
func FuzzChartIndex(f *testing.F) {
	f.Add([]byte("apiVersion: v1\nentries:\n  a:\n  - {name: a, version: 1.0.0, urls: [a.tgz], digest: aa}\n  - {version: x}\n"))
	f.Add([]byte(`{"apiVersion":"v1","entries":{"a":[{"version":"1.0.0","urls":["https://other/a.tgz"]},null]}}`))
	f.Add([]byte("entries: &a {x: *a}"))
	f.Add([]byte("<html>"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		fuzzing.Within(t, 64<<20+uint64(len(raw))*20_000, func() {
			parsed, err := parseIndex(raw)
			if err == nil && parsed.Entries == nil {
				t.Error("an index without entries")
			}
		})
	})
}

// FuzzChartArchive reads the archive of a chart repository or a registry. The archive is compressed, or a tar archive,
// so that mutations do not only cause invalid checksums.
func FuzzChartArchive(f *testing.F) {
	f.Add(rawChart(f, 1, tar.Header{Name: "a/b", Mode: 0o644}))
	f.Add(zipped(f, rawChart(f, maxChartEntries, tar.Header{Name: "a/b", Mode: 0o644})))
	f.Add(rawChart(f, 3, tar.Header{Name: "a/charts/b/c", Mode: 0o644, PAXRecords: recordsOf(1 << 10)}))
	f.Add(rawChart(f, 1, tar.Header{Name: "a/b/../../../c", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}))
	for _, files := range []map[string]string{
		{"Chart.yaml": chartYAML, "Chart.lock": "dependencies: []", "values.yaml": "a: [{}, {}]\n---\nb: &b [*b]", "templates/a.yaml": "{{ .Values.a }}", "charts/c/Chart.yaml": chartYAML, "charts/c/charts/d/values.yaml": "a"},
		{"Chart.yaml": "apiVersion: v1\nname: \"a\\nb\"\nversion: x\n", "requirements.yaml": "dependencies:\n- {name: a}", "requirements.lock": "a: [", `values\.yaml`: ""},
		{"Chart.yaml": chartYAML, "charts/b.tgz": string(archiveOf(f, map[string]string{"Chart.yaml": chartYAML, "charts/c.tgz": "\x1f\x8b"}))},
	} {
		archive := archiveOf(f, files)
		f.Add(archive)
		reader, err := gzip.NewReader(bytes.NewReader(archive))
		if err != nil {
			f.Fatal(err)
		}
		raw, err := io.ReadAll(reader)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		archive := raw
		if !bytes.HasPrefix(raw, []byte("\x1f\x8b")) {
			archive = zipped(t, raw)
		}
		var metadata *helmchart.Metadata
		var err error
		// A compressed archive can have files, headers and values of the maximum size.
		fuzzing.Within(t, 64<<20+uint64(len(raw))*20_000, func() { metadata, err = (&Charts{}).loadMetadata(archive) })
		fuzzing.OneLine(t, err)
		if len(errorText(err)) > 16<<10 {
			t.Errorf("the error has %d bytes", len(err.Error()))
		}
		if err != nil {
			return
		}
		if entries := entriesOf(t, archive); entries > maxChartEntries {
			t.Errorf("an archive with %d entries is accepted", entries)
		}
		if metadata.Name == "" || metadata.Name != filepath.Base(metadata.Name) || len(metadata.Name) > maxFieldSize || len(metadata.Version) > maxFieldSize {
			t.Errorf("a chart with the name %q and the version %q", metadata.Name, metadata.Version)
		}
	})
}

// entriesOf returns the number of entries of a tar.gz archive, without the entries of archives in it.
func entriesOf(t *testing.T, archive []byte) (entries int) {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	for reader := tar.NewReader(unzipped); ; entries++ {
		if _, err := reader.Next(); errors.Is(err, io.EOF) {
			return entries
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// FuzzExpand expands templates of users. It skips inputs with a number that makes them need much time or memory,
// because only the sandbox limits them.
func FuzzExpand(f *testing.F) {
	for _, text := range []string{
		"{{ .Cluster.metadata.name }}", "{{ range $k, $v := .Cluster.metadata.labels }}{{ $k }}={{ $v | quote }}{{ end }}", `{{ (getResource "a").data.x | b64dec }}`, `{{ fail (getResource "a").data.x }}`,
		`{{ define "a" }}{{ template "a" }}{{ end }}{{ template "a" }}`, "{{ .MgmtResources.a.data.x.y }}", `{{ fromYaml "a: [" }}`, `{{ index .Cluster.metadata.labels 1 }}`, "{{ now }}", `{{ env "HOME" }}`, "{{/* a */}}", `{{ toYaml .Cluster | indent 4 }}`, "{{", `{{ dict "a" }}`, `{{ regexMatch "(" "a" }}`, `{{ atoi .MgmtResources.a.data.x }}`,
	} {
		f.Add(text)
	}
	resources := Resources{Objects: map[string]json.RawMessage{"a": json.RawMessage(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"},"data":{"x":"` + secretValue + `"}}`)}, HasSecret: true}
	f.Fuzz(func(t *testing.T, text string) {
		if isCostly(text) {
			t.Skip("the sandbox stops such a template")
		}
		e := expansion{Description: "the text", Text: text, Namespace: "eu", Name: "eu-1", Resources: resources, Cluster: json.RawMessage(`{"metadata":{"name":"eu-1","labels":{"env":"test"}}}`)}
		var expanded Expanded
		var err error
		fuzzing.Within(t, 1<<30, func() { expanded, err = e.expand(&currentLine{}) })
		fuzzing.HidesSecret(t, err, []byte(secretValue), secretValue)
		if len(expanded.Text) > maxExpanded {
			t.Errorf("%d bytes", len(expanded.Text))
		}
		if expanded.IsShared && strings.Contains(expanded.Text, secretValue) {
			t.Errorf("the result of %q is shared, and depends on the subject", text)
		}
	})
}

// FuzzSubstitute substitutes values in built objects. A value is inserted without changes, and the sandbox returns the
// same result. Like FuzzExpand, it skips costly inputs.
func FuzzSubstitute(f *testing.F) {
	for _, text := range []string{
		"a: {{ .value }}", `{{ index . "a-b" | quote }}`, "{{ .gone }}", "{{ .value.x }}", "{{ default (default .value .gone) .gone }}", `{{ get . "gone" | default (.value | default "x") }}`,
		"${value:=${other:=x}}", "{{", "{{ .value", "}}", "{{ {{ .value }} }}", strings.Repeat("{{ .value }}", 5000), strings.Repeat("(", 5000), "{{ " + strings.Repeat("(", 5000), strings.Repeat("{{ if .value }}", 500),
		"\xff{{ .value }}\xfe", "{{ \"\xff\" }}", `{{ fail .password }}`, `{{ .password | atoi }}`, `{{ index . .password }}`, `{{ range .password }}{{ end }}`, `{{ template .password }}`, `{{ .password.x }}`, `{{ fromJson .password }}`, `{{ mustRegexMatch .password "" }}`, `{{ mustToDate .password "" }}`,
		`{{ define "a" }}{{ template "a" . }}{{ end }}{{ template "a" . }}`, `{{ getResource "a" }}`, `{{ env "HOME" }}`, `{{ set . "value" "x" }}`, `{{ unset . "value" }}`, "{{ 1e999 }}", "{{ 99999999999999999999 }}", `{{ tpl .value . }}`, "{{ break }}", "{{- /* a */ -}}", "{{ nil }}",
	} {
		f.Add(text, "b")
	}
	f.Add("{{ .value }}", "{{ .password }}")
	f.Add("{{ fromJson .value }}", strings.Repeat("[", 20_000))
	f.Add("{{ fromYaml .value }}", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]")
	f.Add("{{ .value | toString | trunc 2 }}", "\xff\x00\u2028\n---\n")
	f.Fuzz(func(t *testing.T, text, value string) {
		if isCostly(text) || isCostly(value) {
			t.Skip("the sandbox stops such a template")
		}
		s := substitution{Texts: []Text{{"the first", text}, {"the second", "{{ .value }}"}}, Values: map[string]string{"value": value, "a-b": "c", "password": secretValue}}
		var expanded []string
		var err error
		fuzzing.Within(t, 1<<30+uint64(len(text)+len(value))*20_000, func() { expanded, err = s.expand() })
		if err != nil {
			checkSubstitutionError(t, err, text+value)
			return
		}
		if len(expanded) != 2 || len(expanded[0])+len(expanded[1]) > maxExpanded {
			t.Fatalf("got %d texts, want 2 within the limit", len(expanded))
		}
		if expanded[1] != value {
			t.Errorf("value %q was inserted as %q", value, expanded[1])
		}
		if !strings.Contains(text, "{{") && expanded[0] != text {
			t.Errorf("%q is not a template, and became %q", text, expanded[0])
		}
		if !utf8.ValidString(text) || !utf8.ValidString(value) {
			return // texts and values of objects are UTF-8
		}
		input, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := substituteInSandbox(input, nil); err != nil || !slices.Equal(again.([]string), expanded) {
			t.Errorf("got %q, and in the sandbox %q, %v", expanded, again, err)
		}
	})
}

// checkSubstitutionError checks that an error names the text, and contains no secret that input does not contain.
func checkSubstitutionError(t *testing.T, err error, input string) {
	t.Helper()
	if _, isInvalid := errors.AsType[phase.TerminalError](err); !isInvalid || !strings.Contains(err.Error(), "the first") {
		t.Errorf("got %v, want an error about the first text", err)
	}
	fuzzing.HidesSecret(t, err, []byte(input+secretValue), secretValue)
}

// isCostly returns whether a template may need much time or memory because of a number in it or a costly function.
func isCostly(text string) bool {
	return regexp.MustCompile(`[0-9]{4}|[0-9][xXeE_]|mul|repeat|until|seq|gen|derivePassword|bcrypt|htpasswd|encryptAES|ago|pow`).MatchString(text)
}

// FuzzSignedText reads signatures of registries.
func FuzzSignedText(f *testing.F) {
	f.Add([]byte(`{"critical":{"image":{"docker-manifest-digest":"sha256:aa"},"type":"cosign container image signature"}}`), "sha256:aa")
	f.Add([]byte(`{"SignedEntryTimestamp":"aGk=","Payload":{"body":"e30=","integratedTime":1,"logIndex":1,"logID":"aa"}}`), "")
	f.Fuzz(func(t *testing.T, raw []byte, digest string) {
		err := checkPayload(raw, strings.Join(strings.Fields(digest), "")) // the digest is from the registry client
		fuzzing.OneLine(t, err)
		if err == nil && !json.Valid(raw) {
			t.Errorf("%q is accepted", raw)
		}
		if _, err := parseLegacyLogEntry(raw); err != nil {
			fuzzing.OneLine(t, err)
		}
		if _, err := readKeyring(raw); err != nil {
			fuzzing.OneLine(t, err)
		}
	})
}

// FuzzRepositoryURL parses the URLs of chart repositories. Requests with the login go to the host for which the login
// was read, and no message contains the password of a URL.
func FuzzRepositoryURL(f *testing.F) {
	for _, address := range []string{
		"https://example.com/charts", "http://me:" + secretPassword + "@example.com/a?token=b", "oci://example.com:5000/charts/", "oci://me:" + secretPassword + "@example.com/a",
		"oci://example.com@other/a", `oci://example.com\@other/a`, "oci://example.com?@other/a", "oci://example.com#@other/a", "https://a b/", "oci://", "file:///etc/passwd", "oci://docker.io/a", "https://[::1%25lo]/", "OCI://example.com/a",
		secretPassword, "me:" + secretPassword + "@example.com/charts", "http:/me:" + secretPassword + "@example.com/charts", "ftp://example.com/#" + secretPassword,
	} {
		f.Add(address, "chart")
	}
	f.Add("oci://example.com", "../../other/chart")
	f.Fuzz(func(t *testing.T, address, name string) {
		check := func(err error) {
			t.Helper()
			fuzzing.OneLine(t, err)
			hidesCredentials(t, err, address)
		}
		open, err := openerFor(address)
		check(err)
		if err != nil {
			return
		}
		want, errHost := registryHost(address)
		switch repository := open(&Charts{}, address, Login{Username: "me", Password: secretPassword}, &http.Transport{}).(type) {
		case *ociRegistry:
			opened, err := repository.openRepository(name)
			check(err)
			if err != nil {
				return
			}
			if got, err := registryHost(opened.Reference.Host()); err != nil || errHost != nil || got != want {
				t.Errorf("%q with chart %q: requests go to %q, and the login is for %q (%v)", address, name, got, want, errHost)
			}
		case *httpRepository:
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, repository.url+"index.yaml", nil)
			if err == nil && errHost == nil && request.URL.Host != want && want != "registry-1.docker.io" {
				t.Errorf("%q: requests go to %q, and the login is for %q", address, request.URL.Host, want)
			}
		}
	})
}
