package stories

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/agent"
	"github.com/towline/towline/internal/join"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

const (
	// tokenLife is the minimum of Kubernetes.
	tokenLife = 10 * time.Minute
	tokenNS   = "tokens"
	tokenName = "renewing"
)

// TestToken follows one agent's credential: three renewals without a failed request, a copied manifest whose token is
// invalid, and an agent that was offline until its token had expired.
func TestToken(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.apply(w.hub, deregisterProfile)
	// No program is registered for the agent's image: the agent runs in this process, with a clock that the story sets.
	s := &tokenStory{w: w, plane: localkube.ForTest(t, localkube.Named(tokenName)), hub: w.startGate(rest.AnonymousClientConfig(w.hub.Config))}
	loose := &processAgent{w: w, plane: s.plane, hub: s.hub}
	manifest := w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+tokenNS, "--cluster="+tokenName, "--pullmode", "--labels=env=leaving")
	w.apply(s.plane, loose.readManifest(manifest))
	copied := s.token()
	s.wantRequest(copied, nil)

	agent := s.startAgent()
	w.awaitReady(tokenNS, tokenName)
	w.awaitDeployed(s.plane)
	s.hub.startRecording()
	for range 3 {
		s.renewToken(agent)
	}
	w.kubectl(s.plane, "delete", "configmap", "delivered")
	w.awaitDeployed(s.plane)
	if failed := s.hub.listFailures(); len(failed) > 0 {
		t.Errorf("requests of the agent failed: %q", failed)
	}
	w.eventually("the copied manifest's token is invalid", func() error { return s.wantRefused(copied) })

	agent.stop()
	s.expireToken()
	agent = s.startAgent()
	w.eventually("the agent logs the command", func() error {
		for _, text := range []string{"sveltosctl register cluster --namespace=" + tokenNS + " --cluster=" + tokenName + " --pullmode", "kubectl apply -f"} {
			if !strings.Contains(agent.log.String(), text) {
				return fmt.Errorf("its log does not have %q:\n%s", text, tail(agent.log.String()))
			}
		}
		return nil
	})
	w.kubectl(s.plane, "delete", "configmap", "delivered")
	w.awaitDeployed(s.plane) // it corrects drift meanwhile
	uid := w.kubectl(s.plane, "get", "configmap", "delivered", "-o", "jsonpath={.metadata.uid}/{.metadata.resourceVersion}")
	s.hub.startRecording()
	manifest = w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+tokenNS, "--cluster="+tokenName, "--pullmode")
	w.apply(s.plane, loose.readManifest(manifest))
	w.eventually("the agent uses the new kubeconfig", func() error {
		agent.clock.Step(time.Minute) // it checks the Secret from time to time
		return s.wantHeartbeatAfter(agent.clock.Now().Add(-time.Minute))
	})
	if fetched := s.hub.listBundleReads(); len(fetched) > 0 {
		t.Errorf("the repaired agent read %q, want nothing since it has its record", fetched)
	}
	if now := w.kubectl(s.plane, "get", "configmap", "delivered", "-o", "jsonpath={.metadata.uid}/{.metadata.resourceVersion}"); now != uid {
		t.Errorf("the repair changed the uid of the deployed object: %s, then %s", uid, now)
	}

	stolen := s.token()
	s.wantRequest(stolen, nil)
	w.run(w.hub, "sveltosctl", "register", "cluster", "--namespace="+tokenNS, "--cluster="+tokenName, "--pullmode", "--revoke")
	w.eventually("--revoke makes every older token invalid", func() error { return s.wantRefused(stolen) })
}

// tokenStory is a pull member whose agent runs in the test.
type tokenStory struct {
	w     *world
	plane *localkube.Plane
	hub   *gate
}

// timedAgent is an agent in this process, with the clock of the story.
type timedAgent struct {
	clock *clocktesting.FakeClock
	log   *lockedBuffer
	stop  func()
}

func (s *tokenStory) startAgent() *timedAgent {
	s.w.t.Helper()
	a := &timedAgent{clock: clocktesting.NewFakeClock(time.Now()), log: &lockedBuffer{}}
	ctx, cancel := context.WithCancel(log.IntoContext(context.WithoutCancel(s.w.t.Context()), logInto(a.log)))
	done := make(chan error, 1)
	go func() {
		done <- agent.Run(ctx, agent.Options{
			Member: s.plane.Config, Namespace: tokenNS, Name: tokenName, TokenLife: tokenLife, Clock: a.clock,
		})
	}()
	stopped := false
	a.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			s.w.t.Errorf("the agent ended: %v", err)
		}
	}
	s.w.t.Cleanup(func() {
		a.stop()
		if s.w.t.Failed() {
			s.w.t.Logf("log of the agent:\n%s", tail(a.log.String()))
		}
	})
	return a
}

func logInto(out *lockedBuffer) logr.Logger {
	return funcr.New(func(prefix, args string) { _, _ = fmt.Fprintln(out, prefix, args) }, funcr.Options{LogTimestamp: true})
}

// token returns the token in the member's Secret.
func (s *tokenStory) token() string {
	s.w.t.Helper()
	config, err := clientcmd.RESTConfigFromKubeConfig(s.secret().Data[join.KubeconfigKey])
	if err != nil {
		s.w.t.Fatal(err)
	}
	return config.BearerToken
}

func (s *tokenStory) secret() *corev1.Secret {
	s.w.t.Helper()
	secret := &corev1.Secret{}
	key := client.ObjectKey{Namespace: kube.AgentNamespace, Name: join.KubeconfigSecret(tokenName)}
	if err := s.w.client(s.plane).Get(s.w.t.Context(), key, secret); err != nil {
		s.w.t.Fatal(err)
	}
	return secret
}

// readCluster reads the agent's SveltosCluster from the hub with a token.
func (s *tokenStory) readCluster(token string) error {
	config := rest.AnonymousClientConfig(s.w.hub.Config)
	config.BearerToken = token
	c, err := client.New(config, client.Options{Scheme: kube.Scheme(), Mapper: s.w.client(s.w.hub).RESTMapper()})
	if err != nil {
		return err
	}
	return c.Get(s.w.t.Context(), client.ObjectKey{Namespace: tokenNS, Name: tokenName}, &libv1beta1.SveltosCluster{})
}

func (s *tokenStory) wantRequest(token string, want error) {
	s.w.t.Helper()
	if err := s.readCluster(token); !errors.Is(err, want) {
		s.w.t.Fatalf("a request with the token: %v, want %v", err, want)
	}
}

func (s *tokenStory) wantRefused(token string) error {
	err := s.readCluster(token)
	if err == nil || !strings.Contains(err.Error(), "Unauthorized") {
		return fmt.Errorf("a request with the token returns %w, want Unauthorized", err)
	}
	return nil
}

// renewToken lets four fifths of the token's life pass and waits until the Secret has a new, valid token.
func (s *tokenStory) renewToken(a *timedAgent) {
	s.w.t.Helper()
	before := s.token()
	a.clock.Step(tokenLife * 8 / 10)
	s.w.eventually("the token is renewed", func() error {
		a.clock.Step(time.Second)
		if s.token() == before {
			return errors.New("the token is still the same")
		}
		return nil
	})
	s.wantRequest(s.token(), nil)
}

// wantHeartbeatAfter returns an error unless the hub has a heartbeat that is later than at.
func (s *tokenStory) wantHeartbeatAfter(at time.Time) error {
	out, err := s.w.try(s.w.hub, "kubectl", "get", "lease", tokenName, "-n", tokenNS, "-o", "jsonpath={.spec.renewTime}")
	if err != nil {
		return err
	}
	beat, err := time.Parse(metav1.RFC3339Micro, out)
	if err != nil {
		return err
	}
	if beat.Before(at) {
		return fmt.Errorf("the last heartbeat was at %s, before %s", beat, at)
	}
	return nil
}

// expireToken replaces the token in the member's Secret by an expired one: signed by the hub, with the same claims, but
// from yesterday.
func (s *tokenStory) expireToken() {
	s.w.t.Helper()
	live := s.token()
	parts := strings.Split(live, ".")
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		s.w.t.Fatal(err)
	}
	claims := map[string]any{}
	if err := json.Unmarshal(payload, &claims); err != nil {
		s.w.t.Fatal(err)
	}
	yesterday := time.Now().Add(-24 * time.Hour)
	claims["iat"], claims["nbf"], claims["exp"] = yesterday.Unix(), yesterday.Unix(), yesterday.Add(tokenLife).Unix()
	expired := s.sign(parts[0], claims)
	if err := s.wantRefused(expired); err != nil {
		s.w.t.Fatal(err)
	}
	secret := s.secret()
	for key, value := range secret.Data {
		secret.Data[key] = bytes.ReplaceAll(value, []byte(live), []byte(expired))
	}
	if err := s.w.client(s.plane).Update(s.w.t.Context(), secret); err != nil {
		s.w.t.Fatal(err)
	}
}

// sign signs claims as the hub does.
func (s *tokenStory) sign(header string, claims map[string]any) string {
	s.w.t.Helper()
	keys, err := filepath.Glob(filepath.Join(s.w.hub.Dir, "*", "sa.key"))
	if err != nil || len(keys) != 1 {
		s.w.t.Fatalf("the hub's signing key: %q, %v", keys, err)
	}
	raw, err := os.ReadFile(keys[0])
	if err != nil {
		s.w.t.Fatal(err)
	}
	block, _ := pem.Decode(raw)
	key, err := x509.ParseECPrivateKey(block.Bytes)
	if err != nil {
		s.w.t.Fatal(err)
	}
	payload, err := json.Marshal(claims)
	if err != nil {
		s.w.t.Fatal(err)
	}
	text := header + "." + base64.RawURLEncoding.EncodeToString(payload)
	digest := sha256.Sum256([]byte(text))
	r, sum, err := ecdsa.Sign(rand.Reader, key, digest[:])
	if err != nil {
		s.w.t.Fatal(err)
	}
	// ES256 is the two numbers of the signature, 32 bytes each: RFC 7518, section 3.4.
	signature := append(r.FillBytes(make([]byte, 32)), sum.FillBytes(make([]byte, 32))...)
	return text + "." + base64.RawURLEncoding.EncodeToString(signature)
}
