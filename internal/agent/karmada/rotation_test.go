package karmada

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"

	"github.com/towline/towline/internal/join/bootstrap"
	joinkarmada "github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/join/register"
)

// certificate returns the certificate in the Secret.
func (w *world) certificate() *x509.Certificate {
	w.t.Helper()
	config, err := clientcmd.RESTConfigFromKubeConfig(w.secret().Data[register.KubeconfigKey])
	if err != nil {
		w.t.Fatal(err)
	}
	chain, err := cert.ParseCertsPEM(config.CertData)
	if err != nil {
		w.t.Fatal(err)
	}
	return chain[0]
}

func TestCertificateIsRenewedWithoutARestart(t *testing.T) {
	t.Parallel()
	// The signer issues at least ten minutes, and backdates by five.
	w := newWorld(t, "rotate", 10*time.Minute)
	t.Cleanup(w.approveRequests())
	proxy := w.startFrontProxy()
	_, _, logs := w.startAgent(func(o *Options) { o.RotationThreshold = 0.66; o.LeaseDuration = time.Second })
	w.createWork("one", "first")
	w.wantValue("one", "first")
	serials := []string{certificateID(w.certificate())}
	for len(serials) < 4 {
		w.eventually("the certificate is renewed", func(context.Context) error {
			now := certificateID(w.certificate())
			if slices.Contains(serials, now) {
				return errors.New("it is not")
			}
			serials = append(serials, now)
			return nil
		})
		// All watches use the new certificate before the next renewal.
		began := time.Now()
		w.eventually("all watches use the certificate", proxy.wantWatches(serials[len(serials)-1]))
		t.Logf("all watches use the new certificate %s after it was stored", time.Since(began))
		if lists := proxy.takeLists(); len(serials) > 2 && len(lists) > 0 {
			t.Errorf("watches that did not continue: %v", lists)
		}
	}
	made := w.certificate()
	if got := made.NotAfter.Sub(made.NotBefore); got != 15*time.Minute {
		t.Errorf("lifetime of the last certificate including the backdating: got %s, want 15m", got)
	}
	w.eventually("the last certificate is in use", func(context.Context) error {
		if len(logs.linesWith("the certificate for the hub was renewed")) < 3 {
			return errors.New("it is not")
		}
		return nil
	})
	// No change is missed: a new Work is executed.
	w.createWork("two", "second")
	w.wantValue("two", "second")
	_, failed := w.takeRequests()
	failed = slices.DeleteFunc(failed, func(request string) bool {
		// The agent may read its request only after the hub has granted that. A conflict on a status is retried.
		return strings.Contains(request, "/certificatesigningrequests/") && strings.Contains(request, "403") ||
			strings.Contains(request, "/works/") && strings.Contains(request, "409")
	})
	if len(failed) > 0 {
		t.Errorf("requests that failed: %v", failed)
	}
}

// signShortLived returns a certificate of any lifetime, signed by the hub's authority.
func (w *world) signShortLived(lifetime time.Duration) bootstrap.Certificate {
	w.t.Helper()
	return w.sign(time.Now().Add(lifetime), func(template *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
		authority, private := w.hub.CertificateAuthority(w.t)
		return x509.CreateCertificate(rand.Reader, template, authority, key.Public(), private)
	})
}

// forge returns a certificate that the hub rejects.
func (w *world) forge() bootstrap.Certificate {
	w.t.Helper()
	return w.sign(time.Now().Add(time.Hour), func(template *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
		return x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	})
}

// sign returns a certificate for the agent.
func (w *world) sign(end time.Time, create func(*x509.Certificate, *ecdsa.PrivateKey) ([]byte, error)) bootstrap.Certificate {
	w.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		w.t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: end,
		Subject:     pkix.Name{CommonName: bootstrap.AgentUser(w.name), Organization: []string{bootstrap.AgentsGroup}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := create(template, key)
	if err != nil {
		w.t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		w.t.Fatal(err)
	}
	return bootstrap.Certificate{
		CertPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), KeyPEM: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}
}

func TestRejectedAgentIsRepairedInPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "refused", time.Hour)
	_, stop, _ := w.startAgent()
	w.createWork("one", "first")
	w.wantValue("one", "first")
	w.wantReady()
	stop()
	good := w.secret().Data[register.KubeconfigKey]
	w.writeKubeconfig(w.kubeconfig(w.forge()))
	_, _, j := w.startAgent()
	said := func(context.Context) error {
		lines := j.linesWith(`karmadactl token create --cluster-name=refused --print-register-command`)
		if len(lines) != 1 {
			return fmt.Errorf("%d log lines have it", len(lines))
		}
		return nil
	}
	w.eventually("the agent logs the repair command", said)
	if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("one", "first")
	if err := said(t.Context()); err != nil {
		t.Error(err)
	}
	w.writeKubeconfig(good)
	w.createWork("two", "second")
	w.wantValue("two", "second")
}

// A certificate expires while the agent runs. Open connections may stay open, but the hub rejects requests on them. A
// proxy that verifies certificates rejects with a TLS alert.
func TestExpiredCertificateIsLogged(t *testing.T) {
	t.Parallel()
	for name, gated := range map[string]bool{"ends": false, "gated": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, name, time.Hour)
			good := w.secret().Data[register.KubeconfigKey]
			w.writeKubeconfig(w.kubeconfig(w.signShortLived(15 * time.Second)))
			if gated {
				w.startFrontProxy()
			}
			_, _, j := w.startAgent(func(o *Options) { o.LeaseDuration = 4 * time.Second })
			w.createWork("one", "first")
			w.wantValue("one", "first")
			w.wantReady()
			said := func(context.Context) error {
				lines := j.linesWith(`karmadactl token create --cluster-name=` + name + ` --print-register-command`)
				if len(lines) != 1 {
					return fmt.Errorf("%d log lines have it", len(lines))
				}
				return nil
			}
			w.eventually("the agent logs the repair command", said)
			if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
				t.Fatal(err)
			}
			w.wantValue("one", "first")
			w.letPass(5 * time.Second)
			if err := said(t.Context()); err != nil {
				t.Error(err)
			}
			repaired := time.Now()
			w.writeKubeconfig(good)
			w.eventually("the agent sends heartbeats again", func(context.Context) error {
				if last := w.lastHeartbeat(); last.Before(repaired) {
					return fmt.Errorf("the last heartbeat was at %s", last)
				}
				return nil
			})
			w.createWork("two", "second")
			w.wantValue("two", "second")
		})
	}
}

func TestRenewalTimeAndLifetime(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1e9, 0)
	made := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(100 * time.Hour), Raw: []byte("one")}
	if got, want := renewalTime(made, 0.2), begin.Add(80*time.Hour); !got.Equal(want) {
		t.Errorf("renewal time: got %s, want %s", got, want)
	}
	for name, tc := range map[string]struct {
		total time.Duration
		noted string
		want  time.Duration
	}{
		"long":                              {100 * time.Hour, "", 100 * time.Hour},
		"short, backdated":                  {15 * time.Minute, "", 10 * time.Minute},
		"annotation":                        {15 * time.Minute, formatLifetime(made, 15*time.Minute), 15 * time.Minute},
		"annotation of another certificate": {15 * time.Minute, formatLifetime(&x509.Certificate{Raw: []byte("two")}, time.Hour), 10 * time.Minute},
		"invalid annotation":                {100 * time.Hour, "nonsense", 100 * time.Hour},
	} {
		one := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(tc.total), Raw: []byte("one")}
		if got := requestedLifetime(one, tc.noted); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

func TestMissingClusterIsLogged(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "forgotten", time.Hour)
	_, _, logs := w.startAgent(func(o *Options) { o.LeaseDuration = 4 * time.Second })
	w.createWork("one", "first")
	w.wantValue("one", "first")
	w.wantReady()
	// The hub deletes the agent's permissions with the Cluster. Deployed objects stay, and drift is corrected. The
	// execution namespace stays here: its deletion would request to delete the objects of the Work.
	cluster := w.cluster()
	if err := w.hubClient.Delete(t.Context(), cluster); err != nil {
		t.Fatal(err)
	}
	if err := joinkarmada.DeleteLeftoverRBAC(t.Context(), w.hubClient, cluster.Name); err != nil {
		t.Fatal(err)
	}
	w.eventually("the agent logs that the Cluster is missing", func(context.Context) error {
		if len(logs.linesWith("the hub does not let the agent see its Cluster")) != 1 {
			return errors.New("it does not log that")
		}
		return nil
	})
	if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("one", "first")
	if w.secret().UID == "" {
		t.Error("the Secret was deleted")
	}
}
