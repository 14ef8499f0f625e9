package source_test

import (
	"errors"
	"io"
	"log"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	clocktesting "k8s.io/utils/clock/testing"
	"oras.land/oras-go/v2"
	"oras.land/oras-go/v2/registry/remote"
	"oras.land/oras-go/v2/registry/remote/auth"

	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/source"
)

// chartRegistry serves an OCI registry with a login and some versions of the example chart. It returns its oci:// URL
// and its server.
func chartRegistry(t *testing.T, versions ...string) (string, *countingServer) {
	t.Helper()
	handler := newCountingServer(withPassword(registry.New(registry.Logger(log.New(io.Discard, "", 0)))))
	host := strings.TrimPrefix(serve(t, handler), "http://")
	for _, version := range versions {
		archive, err := examples.Chart{Version: version}.Archive()
		if err != nil {
			t.Fatal(err)
		}
		push(t, host+"/charts/hello:"+strings.ReplaceAll(version, "+", "_"), archive, "application/vnd.cncf.helm.chart.content.v1.tar+gzip")
	}
	push(t, host+"/charts/image:1.0.0", []byte("not a chart"), ocispec.MediaTypeImageLayerGzip)
	return "oci://" + host + "/charts", handler
}

// blob is one layer of an artifact.
type blob struct {
	mediaType   string
	content     []byte
	annotations map[string]string
}

func push(t *testing.T, reference string, layer []byte, mediaType string) ocispec.Descriptor {
	t.Helper()
	return pushArtifact(t, reference, nil, blob{mediaType: mediaType, content: layer})
}

// pushArtifact pushes an artifact of layers, with the tag in reference if it has a tag. If subject is not nil, the
// artifact refers to it and has the type of its first layer.
func pushArtifact(t *testing.T, reference string, subject *ocispec.Descriptor, layers ...blob) ocispec.Descriptor {
	t.Helper()
	opened, err := remote.NewRepository(reference)
	if err != nil {
		t.Fatal(err)
	}
	opened.PlainHTTP = true
	opened.Client = &auth.Client{Credential: auth.StaticCredential(opened.Reference.Registry, auth.Credential{Username: "me", Password: "s:cret"})}
	artifactType := "application/vnd.cncf.helm.config.v1+json"
	if subject != nil {
		artifactType = layers[0].mediaType
	}
	options := oras.PackManifestOptions{Subject: subject, ManifestAnnotations: layers[0].annotations}
	for _, layer := range layers {
		described, err := oras.PushBytes(t.Context(), opened, layer.mediaType, layer.content)
		if err != nil {
			t.Fatal(err)
		}
		described.Annotations = layer.annotations
		options.Layers = append(options.Layers, described)
	}
	manifest, err := oras.PackManifest(t.Context(), opened, oras.PackManifestVersion1_1, artifactType, options)
	if err != nil {
		t.Fatal(err)
	}
	if opened.Reference.Reference == "" {
		return manifest
	}
	if err := opened.Tag(t.Context(), manifest, opened.Reference.Reference); err != nil {
		t.Fatal(err)
	}
	return manifest
}

func TestFetchFromRegistry(t *testing.T) {
	t.Parallel()
	address, _ := chartRegistry(t, "0.1.0", "0.2.0", "v1.0.0", "1.1.0+build.5")
	charts := newCharts(t, t.TempDir())
	login := source.Login{Username: "me", Password: "s:cret", PlainHTTP: true}
	for label, test := range map[string]struct{ chart, version, want string }{
		"as written":         {"repo/hello", "0.1.0", "0.1.0"},
		"leading v too much": {"repo/hello", "v0.2.0", "0.2.0"},
		"leading v missing":  {"hello", "1.0.0", "v1.0.0"},
		"build metadata":     {"hello", "1.1.0+build.5", "1.1.0+build.5"},
		"range":              {"hello", "0.x", "0.2.0"},
		"newest":             {"hello", ">0", "1.1.0+build.5"},
	} {
		t.Run(label, func(t *testing.T) {
			t.Parallel()
			got, err := awaitResult(func() (source.Chart, error) {
				return charts.Fetch(t.Context(), helmChart(address, test.chart, test.version), login, source.Verification{}, nil)
			})
			if err != nil {
				t.Fatal(err)
			}
			if got.Version != test.want {
				t.Errorf("got version %s, want %s", got.Version, test.want)
			}
		})
	}
}

func TestFetchFromRegistryDownloadsOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	address, server := chartRegistry(t, "0.1.0")
	login := source.Login{Username: "me", Password: "s:cret", PlainHTTP: true}
	first, err := newCharts(t, dir).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login, source.Verification{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	server.setHandler(http.NotFoundHandler())
	second, err := newCharts(t, dir).Fetch(t.Context(), helmChart(address, "hello", "0.1.0"), login, source.Verification{}, nil)
	if err != nil || first != second {
		t.Errorf("got %v and %v, want the same chart again", second, err)
	}
}

// TestTagsAreListedOnceAMinute fetches a range of versions several times, like the clusters of a rollout.
func TestTagsAreListedOnceAMinute(t *testing.T) {
	t.Parallel()
	address, server := chartRegistry(t, "0.1.0")
	clock := clocktesting.NewFakePassiveClock(time.Unix(0, 0))
	charts, err := source.NewCharts(t.TempDir(), clock)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		password, version string
		seconds           int64
		isListed          bool
	}{
		{"s:cret", "0.x", 0, true},
		{"s:cret", ">=0.1", 59, false},
		{"wrong", "0.x", 59, true}, // the hub does not use the tags that were listed for another login
		{"s:cret", "0.x", 61, true},
	} {
		clock.SetTime(time.Unix(step.seconds, 0))
		before := server.countRequests("/v2/charts/hello/tags/list")
		login := source.Login{Username: "me", Password: step.password, PlainHTTP: true}
		_, err := charts.Fetch(t.Context(), helmChart(address, "hello", step.version), login, source.Verification{}, nil)
		if (err == nil) != (step.password == "s:cret") {
			t.Errorf("%v: got %v", step, err)
		}
		if got := server.countRequests("/v2/charts/hello/tags/list") > before; got != step.isListed {
			t.Errorf("%v: the tags were listed: %t", step, got)
		}
	}
}

func TestFetchFromRegistryErrors(t *testing.T) {
	t.Parallel()
	charts := newCharts(t, t.TempDir())
	address, _ := chartRegistry(t, "0.1.0")
	login := source.Login{Username: "me", Password: "s:cret", PlainHTTP: true}
	for label, test := range map[string]struct {
		address, chart, version string
		login                   source.Login
		want                    []string
		missing                 bool
	}{
		"no such version": {address, "hello", "9.9.9", login, []string{"chart hello 9.9.9 in " + address + ": does not exist"}, true},
		"no such range":   {address, "hello", ">9", login, []string{"does not exist"}, true},
		"no such chart":   {address, "other", "0.1.0", login, []string{"does not exist"}, true},
		"not a chart":     {address, "image", "1.0.0", login, []string{"charts/image is not a Helm chart"}, false},
		"wrong password":  {address, "hello", "0.1.0", source.Login{Username: "me", Password: "guess", PlainHTTP: true}, []string{"401"}, false},
		"no login":        {address, "hello", "0.1.0", source.Login{PlainHTTP: true}, []string{address}, false},
		"TLS expected":    {address, "hello", "0.1.0", source.Login{Username: "me", Password: "s:cret"}, []string{"HTTP response to HTTPS client"}, false},
		"unreachable":     {"oci://127.0.0.1:1", "hello", "0.1.0", login, []string{"oci://127.0.0.1:1", "connection refused"}, false},
		"not an address":  {"oci://", "hello", "0.1.0", login, []string{`repositoryURL "oci:" has no valid host`}, false},
	} {
		t.Run(label, func(t *testing.T) {
			t.Parallel()
			_, err := awaitResult(func() (source.Chart, error) {
				return charts.Fetch(t.Context(), helmChart(test.address, test.chart, test.version), test.login, source.Verification{}, nil)
			})
			if errors.Is(err, source.ErrNotFound) != test.missing {
				t.Errorf("got %v, want ErrNotFound: %v", err, test.missing)
			}
			wantTexts(t, err, test.want...)
		})
	}
}
