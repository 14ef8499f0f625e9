package source

import (
	"crypto"
	"crypto/ed25519"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sigstore/sigstore-go/pkg/root"
	"github.com/sigstore/sigstore-go/pkg/tuf"
	"github.com/sigstore/sigstore/pkg/signature"
	"github.com/theupdateframework/go-tuf/v2/metadata"
	clocktesting "k8s.io/utils/clock/testing"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// emptyRoot is a trust root without authorities.
const emptyRoot = `{"mediaType":"` + root.TrustedRootMediaType01 + `"}`

// tufRepository returns a TUF repository with emptyRoot, in the format of Sigstore's repository: the files by path, and
// the initial metadata of clients.
func tufRepository(t *testing.T) (files map[string][]byte, anchor []byte) {
	t.Helper()
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	key, err := metadata.KeyFromPublicKey(public)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := signature.LoadSigner(private, crypto.Hash(0))
	if err != nil {
		t.Fatal(err)
	}
	tomorrow := time.Now().Add(24 * time.Hour)
	target, err := metadata.TargetFile().FromBytes("trusted_root.json", []byte(emptyRoot), "sha256")
	if err != nil {
		t.Fatal(err)
	}
	first, targets := metadata.Root(tomorrow), metadata.Targets(tomorrow)
	targets.Signed.Targets["trusted_root.json"] = target
	for _, role := range []string{metadata.ROOT, metadata.TARGETS, metadata.SNAPSHOT, metadata.TIMESTAMP} {
		if err := first.Signed.AddKey(key, role); err != nil {
			t.Fatal(err)
		}
	}
	anchor = signed(t, first, signer)
	return map[string][]byte{
		"/timestamp.json":  signed(t, metadata.Timestamp(tomorrow), signer),
		"/1.snapshot.json": signed(t, metadata.Snapshot(tomorrow), signer),
		"/1.targets.json":  signed(t, targets, signer),
		"/targets/" + target.Hashes["sha256"].String() + ".trusted_root.json": []byte(emptyRoot),
	}, anchor
}

func signed[T metadata.Roles](t *testing.T, role *metadata.Metadata[T], signer signature.Signer) []byte {
	t.Helper()
	if _, err := role.Sign(signer); err != nil {
		t.Fatal(err)
	}
	raw, err := role.ToBytes(false)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestPublicTrustRootIsFetchedOnceADay(t *testing.T) {
	t.Parallel()
	files, anchor := tufRepository(t)
	var requests atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		file, ok := files[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(file)
	}))
	dir := t.TempDir()
	options := func() *tuf.Options { return tuf.DefaultOptions().WithRoot(anchor).WithRepositoryBaseURL(server.URL) }
	if _, err := publicRoot(dir, options())(); err != nil {
		t.Fatal(err)
	}
	if requests.Load() == 0 {
		t.Error("the repository got no request")
	}
	server.Close()
	if _, err := publicRoot(dir, options())(); err != nil {
		t.Errorf("verify with a cached trust root and without its repository: %v", err)
	}
	if _, err := publicRoot(t.TempDir(), options())(); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("got %v, want an error about the connection", err)
	}
}

// Without its own trust root, a keyless verification uses the public trust root, and is retried while its repository is
// unreachable.
func TestPublicTrustRootIsUsedUnlessAnotherIsGiven(t *testing.T) {
	t.Parallel()
	public, err := root.NewTrustedRootFromJSON([]byte(emptyRoot))
	if err != nil {
		t.Fatal(err)
	}
	charts, err := NewCharts(t.TempDir(), clocktesting.NewFakePassiveClock(time.Unix(0, 0)))
	if err != nil {
		t.Fatal(err)
	}
	charts.publicRoot = func() (root.TrustedMaterial, error) { return public, nil }
	if got, err := charts.trustRoot(nil); err != nil || got != root.TrustedMaterial(public) {
		t.Errorf("got %v and %v, want the public trust root", got, err)
	}
	charts.publicRoot = func() (root.TrustedMaterial, error) { return nil, errors.New("connection refused") }
	_, err = charts.newSignaturePolicy(SignatureRequirement{Identities: []configv1beta1.OIDCIdentityMatch{{Issuer: ".", Subject: "."}}})
	if err == nil || errors.As(err, &phase.TerminalError{}) || errors.Is(err, ErrUnverified) {
		t.Errorf("got %v, want an error that is retried", err)
	}
	if _, err := charts.trustRoot([]byte(emptyRoot)); err != nil {
		t.Errorf("verify with an own trust root: %v", err)
	}
}
