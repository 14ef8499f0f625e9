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

// certificate is the one in the Secret.
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
	// The signer gives no less than ten minutes, and dates the certificate back by five.
	w := newWorld(t, "rotate", 10*time.Minute)
	t.Cleanup(w.approve())
	door := w.inlet()
	_, _, j := w.start(func(o *Options) { o.RotationThreshold = 0.66; o.LeaseDuration = time.Second })
	w.work("one", "first")
	w.wantValue("one", "first")
	serials := []string{serial(w.certificate())}
	for len(serials) < 4 {
		w.eventually("the certificate is renewed", func(context.Context) error {
			now := serial(w.certificate())
			if slices.Contains(serials, now) {
				return errors.New("it is not")
			}
			serials = append(serials, now)
			return nil
		})
		// Its watches leave the old one behind before the next renewal.
		began := time.Now()
		w.eventually("all watches use the certificate", door.only(serials[len(serials)-1]))
		t.Logf("all watches use the new certificate %s after it was kept", time.Since(began))
		if lists := door.listed(); len(serials) > 2 && len(lists) > 0 {
			t.Errorf("watches that did not go on where they were: %v", lists)
		}
	}
	made := w.certificate()
	if got := made.NotAfter.Sub(made.NotBefore); got != 15*time.Minute {
		t.Errorf("life of the last certificate, with what it is dated back: got %s, want 15m", got)
	}
	w.eventually("the last one is in use", func(context.Context) error {
		if len(j.with("the certificate for the hub was renewed")) < 3 {
			return errors.New("it is not")
		}
		return nil
	})
	// Nothing is missed: a Work that comes now is executed.
	w.work("two", "second")
	w.wantValue("two", "second")
	_, failed := w.take()
	failed = slices.DeleteFunc(failed, func(request string) bool {
		// Until the hub has let it look at its request, it may not. A status that was made from an older one is made again.
		return strings.Contains(request, "/certificatesigningrequests/") && strings.Contains(request, "403") ||
			strings.Contains(request, "/works/") && strings.Contains(request, "409")
	})
	if len(failed) > 0 {
		t.Errorf("requests that failed: %v", failed)
	}
}

// lasting makes a certificate of any life, however short, that the hub accepts.
func (w *world) lasting(life time.Duration) bootstrap.Certificate {
	w.t.Helper()
	return w.sign(time.Now().Add(life), func(template *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
		authority, private := w.hub.Authority(w.t)
		return x509.CreateCertificate(rand.Reader, template, authority, key.Public(), private)
	})
}

// forge makes a certificate that the hub does not accept.
func (w *world) forge() bootstrap.Certificate {
	w.t.Helper()
	return w.sign(time.Now().Add(time.Hour), func(template *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
		return x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	})
}

// sign makes a certificate for the agent.
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

func TestRefusedAgentSaysWhatToRunAndIsRepairedInPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "refused", time.Hour)
	_, stop, _ := w.start()
	w.work("one", "first")
	w.wantValue("one", "first")
	w.ready()
	stop()
	good := w.secret().Data[register.KubeconfigKey]
	w.keep(w.kubeconfig(w.forge()))
	_, _, j := w.start()
	said := func(context.Context) error {
		lines := j.with(`karmadactl token create --cluster-name=refused --print-register-command`)
		if len(lines) != 1 {
			return fmt.Errorf("it is said in %d lines", len(lines))
		}
		return nil
	}
	w.eventually("the agent says what to run", said)
	if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("one", "first")
	if err := said(t.Context()); err != nil {
		t.Error(err)
	}
	w.keep(good)
	w.work("two", "second")
	w.wantValue("two", "second")
}

// A certificate may end while the agent runs, because nobody answers its requests for the next one. Connections that are open then may stay
// open: that the hub refuses shows in what is asked over them. A gate that checks certificates itself refuses in its own way.
func TestAgentWhoseCertificateEndsSaysWhatToRun(t *testing.T) {
	t.Parallel()
	for name, gated := range map[string]bool{"ends": false, "gated": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, name, time.Hour)
			good := w.secret().Data[register.KubeconfigKey]
			w.keep(w.kubeconfig(w.lasting(15 * time.Second)))
			if gated {
				w.inlet()
			}
			_, _, j := w.start(func(o *Options) { o.LeaseDuration = 4 * time.Second })
			w.work("one", "first")
			w.wantValue("one", "first")
			w.ready()
			said := func(context.Context) error {
				lines := j.with(`karmadactl token create --cluster-name=` + name + ` --print-register-command`)
				if len(lines) != 1 {
					return fmt.Errorf("it is said in %d lines", len(lines))
				}
				return nil
			}
			w.eventually("the agent says what to run", said)
			if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
				t.Fatal(err)
			}
			w.wantValue("one", "first")
			w.settle(5 * time.Second)
			if err := said(t.Context()); err != nil {
				t.Error(err)
			}
			repaired := time.Now()
			w.keep(good)
			w.eventually("the agent is heard", func(context.Context) error {
				if last := w.heartbeat(); last.Before(repaired) {
					return fmt.Errorf("it is silent since %s", last)
				}
				return nil
			})
			w.work("two", "second")
			w.wantValue("two", "second")
		})
	}
}

func TestDueAndLifeOfCertificates(t *testing.T) {
	t.Parallel()
	begin := time.Unix(1e9, 0)
	made := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(100 * time.Hour), Raw: []byte("one")}
	if got, want := due(made, 0.2), begin.Add(80*time.Hour); !got.Equal(want) {
		t.Errorf("due: got %s, want %s", got, want)
	}
	for name, tc := range map[string]struct {
		total time.Duration
		noted string
		want  time.Duration
	}{
		"long":                         {100 * time.Hour, "", 100 * time.Hour},
		"short, dated back":            {15 * time.Minute, "", 10 * time.Minute},
		"noted":                        {15 * time.Minute, noteLife(made, 15*time.Minute), 15 * time.Minute},
		"noted for another":            {15 * time.Minute, noteLife(&x509.Certificate{Raw: []byte("two")}, time.Hour), 10 * time.Minute},
		"noted by somebody who cannot": {100 * time.Hour, "nonsense", 100 * time.Hour},
	} {
		one := &x509.Certificate{NotBefore: begin, NotAfter: begin.Add(tc.total), Raw: []byte("one")}
		if got := lifeOf(one, tc.noted); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

func TestForgottenAgentSaysSo(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "forgotten", time.Hour)
	_, _, j := w.start(func(o *Options) { o.LeaseDuration = 4 * time.Second })
	w.work("one", "first")
	w.wantValue("one", "first")
	w.ready()
	// With the Cluster the hub takes the rights of its agent. What it deployed stays, and is healed.
	gone := w.cluster()
	if err := w.hubClient.Delete(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	if err := joinkarmada.RemoveTraces(t.Context(), w.hubClient, gone); err != nil {
		t.Fatal(err)
	}
	w.eventually("the agent says so", func(context.Context) error {
		if len(j.with("the hub does not let the agent see its Cluster")) != 1 {
			return errors.New("it does not")
		}
		return nil
	})
	if err := w.memberClient.Delete(t.Context(), w.configMap("one")); err != nil {
		t.Fatal(err)
	}
	w.wantValue("one", "first")
	if w.secret().UID == "" {
		t.Error("the Secret is gone")
	}
}
