package source

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/go-git/go-git/v5/plumbing"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/towline/towline/test/fuzzing"
)

// secretOfServer is a text in the seeds that no error may contain.
const secretOfServer = "s3cret-text-of-the-server"

// registryHostName is the registry of the fuzz targets.
const registryHostName = "registry.example.com"

// maxPages ends an endless list of tags.
const maxPages = 20

// roundTripper is a function that implements http.RoundTripper.
type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return f(request) }

// respond returns a response with a body.
func respond(request *http.Request, status int, header http.Header, body []byte) *http.Response {
	return &http.Response{
		StatusCode: status, Header: header, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), Request: request,
	}
}

// registryOf returns a registry that responds with serve. It fails the test if the login is sent to another host.
func registryOf(t *testing.T, serve roundTripper) *ociRegistry {
	t.Helper()
	transport := roundTripper(func(request *http.Request) (*http.Response, error) {
		// http.Client sends the user and password of a link such as //user:password@host. Only secretPassword is the login.
		if _, password, _ := request.BasicAuth(); password == secretPassword && request.URL.Host != registryHostName {
			t.Errorf("the login is sent to %q", request.URL.Host)
		}
		return serve(request)
	})
	login := Login{Username: "me", Password: secretPassword, PlainHTTP: true}
	return newOCIRegistry(&Charts{}, "oci://"+registryHostName+"/charts", login, transport).(*ociRegistry)
}

// FuzzManifest reads the manifest of a chart in a registry, and the layer that it names. The result has a digest of the
// manifest, and no error contains a text of the registry.
func FuzzManifest(f *testing.F) {
	content := []byte("a chart")
	digestOf := func(raw []byte) string {
		sum := sha256.Sum256(raw)
		return "sha256:" + hex.EncodeToString(sum[:])
	}
	const manifestType = ocispec.MediaTypeImageManifest
	layer := func(digest, size string) []byte {
		return []byte(`{"layers":[{"mediaType":"` + chartMediaTypes()[0] + `","digest":"` + digest + `","size":` + size + `}]}`)
	}
	f.Add(layer(digestOf(content), "7"), content, manifestType, "")
	for _, size := range []string{"-1", "0", "6", "8", "104857601", "9223372036854775807", "1e3", `"7"`} {
		f.Add(layer(digestOf(content), size), content, manifestType, "")
	}
	for _, digest := range []string{"", "sha256:", "sha256:aa", "md5:" + strings.Repeat("a", 32), "sha512:" + strings.Repeat("a", 128), "../../../v2/other/manifests/a", "sha256:../" + secretOfServer, "\n", "a?b#c"} {
		f.Add(layer(digest, "7"), content, manifestType, "")
	}
	f.Add([]byte(`{"layers":[{"mediaType":"`+chartMediaTypes()[0]+`","digest":"`+digestOf(content)+`","size":7,"urls":["http://other/"],"data":"YSBjaGFydA=="}]}`), content, manifestType, "")
	f.Add([]byte(`{"layers":["`+secretOfServer+`"]}`), content, manifestType, "")
	f.Add([]byte(`{"layers":[`+strings.Repeat("{},", 300_000)+`{}]}`), content, manifestType, "")
	f.Add([]byte(strings.Repeat(`{"subject":`, 20_000)), content, manifestType, "")
	f.Add([]byte(`<html>`+secretOfServer), content, "text/html", "")
	f.Add([]byte(`{"layers":null}`), content, secretOfServer+"\n", "sha256:"+secretOfServer)
	f.Add([]byte(`{}`), content, manifestType, digestOf(content))
	f.Fuzz(func(t *testing.T, manifest, content []byte, mediaType, digest string) {
		if digest == "" {
			digest = digestOf(manifest)
		}
		registry := registryOf(t, func(request *http.Request) (*http.Response, error) {
			if request.URL.Host != registryHostName {
				t.Errorf("a request to %s", request.URL)
			}
			if strings.HasPrefix(request.URL.Path, "/v2/charts/hello/blobs/") {
				return respond(request, http.StatusOK, http.Header{}, content), nil
			}
			body := manifest
			response := respond(request, http.StatusOK, http.Header{"Content-Type": {mediaType}, "Docker-Content-Digest": {digest}}, body)
			if request.Method == http.MethodHead {
				response.Body = http.NoBody
			}
			return response, nil
		})
		fuzzing.Within(t, 32<<20+uint64(len(manifest)+len(content))*100, func() {
			archive, err := registry.downloadLayer(t.Context(), location{url: "hello", digest: "1.0.0"}, 1<<20, chartMediaTypes()...)
			checkServerError(t, err)
			if err != nil {
				return
			}
			var parsed ocispec.Manifest
			if err := json.Unmarshal(manifest, &parsed); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(archive, content) || !slices.ContainsFunc(parsed.Layers, func(l ocispec.Descriptor) bool {
				return l.Size == int64(len(archive)) && (l.Digest.Algorithm() != "sha256" || l.Digest.String() == digestOf(archive))
			}) {
				t.Errorf("%q is accepted as a layer of %s", archive, manifest)
			}
		})
	})
}

func TestErrorsOfManifestsHaveNoText(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		`{"layers":[]}`:                                        "",
		`{"layers":["` + secretOfServer + `"]}`:                "it is not a valid OCI manifest",
		`<html>` + secretOfServer:                              "it is not a valid OCI manifest",
		`{"layers":[` + strings.Repeat("{},", 60_000) + `{}]}`: "it has more than 50000 values",
	} {
		if _, err := decodeManifest([]byte(raw)); errorText(err) != want {
			t.Errorf("%.40s: got %v, want %s", raw, err, want)
		}
	}
}

func TestErrorsOfSignaturesHaveNoText(t *testing.T) {
	t.Parallel()
	payload := func(kind, digest string) error {
		return checkPayload(fmt.Appendf(nil, `{"critical":{"image":{"docker-manifest-digest":%q},"type":%q}}`, digest, kind), "sha256:aa")
	}
	legacy := func(name, text string) error {
		_, err := legacyMaterial(map[string]string{annotationCertificate: "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n", name: text})
		return err
	}
	_, errBundle := parseBundle([]byte(`{"mediaType":"` + secretOfServer + `"}`))
	_, errField := parseBundle([]byte(`{"` + secretOfServer + `":1}`))
	for name, err := range map[string]error{
		"type":            payload(secretOfServer, "sha256:aa"),
		"digest":          payload("cosign container image signature", secretOfServer),
		"log entry":       legacy(annotationLogEntry, `{"Payload":{"logIndex":"`+secretOfServer+`"}}`),
		"timestamp":       legacy(annotationTimestamp, `{"SignedRFC3161Timestamp":"`+secretOfServer+`"}`),
		"bundle":          errBundle,
		"field of bundle": errField,
	} {
		if err == nil {
			t.Errorf("%s: the signature is accepted", name)
		}
		checkServerError(t, err)
	}
}

// A registry names its token server, which gets the login. The token server of Docker's registry is on another host.
func TestTokenServers(t *testing.T) {
	t.Parallel()
	for realm, isAccepted := range map[string]bool{
		"https://auth.example.com/token":                true,
		"http://auth.example.com/token":                 false,
		"https://10.0.0.1/token":                        false,
		"https://auth.example.com:" + secretOfServer:    false,
		"https://auth.example.com/%zz" + secretOfServer: false,
		secretOfServer + "://auth.example.com/token":    false,
	} {
		hasLogin := false
		transport := roundTripper(func(request *http.Request) (*http.Response, error) {
			if request.URL.Host == registryHostName {
				header := http.Header{"Www-Authenticate": {fmt.Sprintf("Bearer realm=%q", realm)}}
				return respond(request, http.StatusUnauthorized, header, nil), nil
			}
			_, password, _ := request.BasicAuth()
			hasLogin = hasLogin || password == secretPassword
			return respond(request, http.StatusOK, http.Header{}, []byte(`{"token":"a"}`)), nil
		})
		registry := newOCIRegistry(&Charts{}, "oci://"+registryHostName+"/charts", Login{Username: "me", Password: secretPassword}, transport)
		_, err := registry.locate(t.Context(), "hello", "1.0.0")
		checkServerError(t, err)
		if err == nil || hasLogin != isAccepted {
			t.Errorf("%s: the login is sent: %t, want %t (%v)", realm, hasLogin, isAccepted, err)
		}
	}
}

// A registry lists referrers of a chart with invalid digests.
func TestReferrersWithoutADigest(t *testing.T) {
	t.Parallel()
	list := fmt.Sprintf(`{"schemaVersion":2,"mediaType":%q,"manifests":[{"mediaType":%q,"artifactType":%q,"size":1,"digest":%q}]}`,
		ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, bundleMediaType, "sha256:"+secretOfServer)
	registry := registryOf(t, func(request *http.Request) (*http.Response, error) {
		if !strings.Contains(request.URL.Path, "/referrers/") {
			t.Errorf("request to %s", request.URL)
		}
		return respond(request, http.StatusOK, http.Header{"Content-Type": {ocispec.MediaTypeImageIndex}}, []byte(list)), nil
	})
	found, unreadable, err := registry.bundleSignatures(t.Context(), location{url: "hello", digest: "sha256:" + strings.Repeat("a", 64)})
	checkServerError(t, err)
	if len(found) > 0 || err == nil && len(unreadable) == 0 {
		t.Errorf("got %v, %v, %v, want one unreadable signature", found, unreadable, err)
	}
}

// checkServerError checks that an error has one line, and contains neither a text of the server nor the password.
func checkServerError(t *testing.T, err error) {
	t.Helper()
	fuzzing.OneLine(t, err)
	for _, secret := range []string{secretOfServer, secretPassword} {
		fuzzing.HidesSecret(t, err, []byte(secret), secret)
	}
}

// FuzzTags lists the tags of a chart on two pages. The link between them may point to another host or to itself.
func FuzzTags(f *testing.F) {
	const next = `</v2/charts/hello/tags/list?last=b>; rel="next"`
	f.Add([]byte(`{"tags":["1.0.0","1.0.0_build.1"]}`), next, []byte(`{"tags":["2.0.0"]}`), http.StatusOK)
	f.Add([]byte(`{"tags":[]}`), `<http://other.example.com/v2/charts/hello/tags/list>; rel="next"`, []byte(`{"tags":[]}`), http.StatusOK)
	f.Add([]byte(`{"tags":null}`), `</v2/charts/hello/tags/list>; rel="next"`, []byte(`{"tags":["a"]}`), http.StatusOK)
	f.Add([]byte(`{"tags":["`+secretOfServer+`",1]}`), "", []byte{}, http.StatusOK)
	f.Add([]byte(`{"tags":["a"]}`), "<http://"+secretOfServer+"\x7f>", []byte(secretOfServer), http.StatusOK)
	f.Add([]byte(`{"tags":["a"]}`), "<http://example.com:"+secretOfServer+">", []byte{}, http.StatusOK)
	f.Add([]byte(`{"errors":[{"code":"DENIED","message":"`+secretOfServer+`\n"}]}`), "", []byte{}, http.StatusForbidden)
	f.Add([]byte(`{"errors":[{"code":"NAME_UNKNOWN"}]}`), "", []byte{}, http.StatusNotFound)
	f.Add([]byte(`{"tags":["`+strings.Repeat(`","`, 120_000)+`"]}`), next, []byte(`{}`), http.StatusOK)
	f.Add([]byte(strings.Repeat("[", 20_000)), "<", []byte(`{"tags":`), http.StatusOK)
	f.Fuzz(func(t *testing.T, first []byte, link string, second []byte, status int) {
		if status < http.StatusOK || status > 599 || status == http.StatusUnauthorized {
			t.Skip("the client does not return such a response, or asks for a token")
		}
		requests := 0
		registry := registryOf(t, func(request *http.Request) (*http.Response, error) {
			if requests++; requests > maxPages {
				return nil, errors.New("more pages than the target serves")
			}
			body := second
			if requests == 1 {
				body = first
			}
			return respond(request, status, http.Header{"Link": {link}}, body), nil
		})
		opened, err := registry.openRepository("hello")
		if err != nil {
			t.Fatal(err)
		}
		fuzzing.Within(t, 32<<20+uint64(len(first)+maxPages*len(second))*100, func() {
			versions, err := listVersions(t.Context(), opened)
			checkServerError(t, err)
			if len(versions) > maxTags {
				t.Errorf("%d versions", len(versions))
			}
			if err == nil && status >= 300 {
				t.Errorf("a response with status %d is accepted", status)
			}
		})
	})
}

// gitServer is a connection to a server that sends these bytes. It records the request. listed has the commits of the
// references that the server sent.
type gitServer struct {
	advertised []byte
	requested  []byte
	listed     map[plumbing.Hash]bool
}

var errRecorded = errors.New("the request was recorded")

func (g *gitServer) advertisement(context.Context) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(g.advertised)), nil
}

func (g *gitServer) request(_ context.Context, body []byte) (io.ReadCloser, error) {
	g.requested = body
	return nil, errRecorded
}

func (*gitServer) close() {}

// FuzzAdvertisement reads the list of references of a Git server. A commit is requested only if the server lists it or
// the profile names it, and no error contains a text of the server.
func FuzzAdvertisement(f *testing.F) {
	const hash, other = "1111111111111111111111111111111111111111", "2222222222222222222222222222222222222222"
	const capabilities = "side-band-64k ofs-delta shallow no-progress symref=HEAD:refs/heads/main agent=git/2"
	line := func(text string) string {
		const digits = "0123456789abcdef"
		n := len(text) + 4
		return string([]byte{digits[n>>12&15], digits[n>>8&15], digits[n>>4&15], digits[n&15]}) + text
	}
	const prefix = "001e# service=git-upload-pack\n0000"
	head := line(hash + " HEAD\x00" + capabilities + "\n")
	add := func(text string, refs ...string) {
		for _, ref := range append(refs, "", "main", hash) {
			f.Add([]byte(text), ref)
		}
	}
	add(prefix+head+line(hash+" refs/heads/main\n")+line(other+" refs/tags/v1\n")+line(hash+" refs/tags/v1^{}\n")+"0000", "v1", "refs/tags/v1", "refs/tags/v1^{}", other, "HEAD", "../main")
	add(head + line(hash+" refs/heads/main\n") + line("shallow "+other) + "0000")
	add(prefix + line(strings.Repeat("0", 40)+" capabilities^{}\x00"+capabilities+"\n") + "0000")
	add(prefix+line("ERR "+secretOfServer+"\n"), secretOfServer)
	add(prefix + line(hash+" HEAD\x00symref=HEAD:"+secretOfServer+" symref=HEAD symref multi_ack=1 agent=\n") + "0000")
	add(prefix + head + line(hash+" \n") + line(hash+" refs/heads/ma in\n") + line(hash+" refs/heads/main\n") + line(other+" refs/heads/main\n") + "0000")
	add(prefix + head + line("shallow "+secretOfServer+"\n") + "0000")
	add(prefix + head + line(hash+" refs/heads/\xff\x00\n") + "0001" + "0002" + "fff0")
	add(prefix + head + strings.Repeat(line(hash+" refs/heads/"+secretOfServer+"\n"), 100))
	add("", "main")
	add("0000")
	add("0004")
	add("ffff")
	add("-001" + secretOfServer)
	f.Fuzz(func(t *testing.T, advertised []byte, ref string) {
		if path.Clean("/"+ref) != "/"+ref && ref != "" || strings.ContainsAny(ref, "\n\r") {
			t.Skip("the name is from a URL")
		}
		server := &gitServer{advertised: advertised}
		fuzzing.Within(t, 32<<20+uint64(len(advertised))*200, func() {
			err := requestCommit(t, server, ref)
			fuzzing.OneLine(t, err)
			if ref != secretOfServer {
				fuzzing.HidesSecret(t, err, []byte(secretOfServer), secretOfServer)
			}
		})
		for _, request := range strings.Split(string(server.requested), "want ")[1:] {
			wanted, _, _ := strings.Cut(request, " ")
			wanted = strings.TrimSpace(wanted)[:40]
			if !server.listed[plumbing.NewHash(wanted)] && strings.ToLower(ref) != wanted {
				t.Errorf("commit %s is requested, which is not advertised", wanted)
			}
		}
	})
}

// requestCommit requests the commit of a reference like fetchCommit.
func requestCommit(t *testing.T, server *gitServer, ref string) error {
	t.Helper()
	advertised, err := readAdvertisement(t.Context(), server)
	if err != nil {
		return err
	}
	server.listed = map[plumbing.Hash]bool{}
	for _, hash := range advertised.References {
		server.listed[hash] = true
	}
	if advertised.Head != nil {
		server.listed[*advertised.Head] = true
	}
	hash, isAdvertised, err := findGitReference(advertised, ref)
	if err != nil {
		return err
	}
	if isAdvertised == (hash == plumbing.ZeroHash) && ref == "" {
		t.Errorf("the default branch has hash %s", hash)
	}
	_, err = (&remoteRequest{}).fetchPack(t.Context(), server, advertised, hash, isAdvertised)
	if err == nil {
		t.Error("a pack without a response")
	}
	return err
}
