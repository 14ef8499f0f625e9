package karmada

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/towline/towline/internal/agent/session"
	"github.com/towline/towline/internal/join/bootstrap"
)

const (
	// rotationTimeout is how long the hub may take to issue a certificate.
	rotationTimeout = 5 * time.Minute
	// minRotationInterval is the minimal time between two renewals, even for short lifetimes.
	minRotationInterval = 5 * time.Second
	// minRotationRetry and maxRotationRetry bound the growing delay between attempts to renew.
	minRotationRetry = time.Second
	maxRotationRetry = 10 * time.Second
	// deniedRotationInterval is the delay after the hub has denied a renewal. It is long, because each request leaves
	// objects on the hub.
	deniedRotationInterval = 10 * time.Minute
)

// renewal is an issued certificate, which must be stored before it is used.
type renewal struct {
	// oldKubeconfig has the previous certificate, and newKubeconfig the issued one.
	oldKubeconfig, newKubeconfig []byte
	certificate                  *x509.Certificate
	lifetime                     time.Duration // as it was requested
}

// watchCredential renews the certificate in time. It returns nil when ctx ends, and errReplaced when the stored
// kubeconfig is not the one in use.
func (s *hubSession) watchCredential(ctx context.Context) error {
	retry := newRotationBackoff()
	next := s.nextCertificateCheck(ctx)
	for {
		nextCheck := s.opts.Clock.Now().Add(credentialCheckInterval)
		if !next.IsZero() && next.Before(nextCheck) {
			nextCheck = next
		}
		if !s.sleepUntil(ctx, nextCheck) {
			return nil
		}
		if !s.opts.isEnabled(clusterStatus) { // no heartbeats reset the watchdog
			s.metrics.Watchdog.Reset()
		}
		if s.isReplaced(ctx) {
			return errReplaced
		}
		if next.IsZero() || s.opts.Clock.Now().Before(next) {
			continue
		}
		if !s.isRenewalDue() {
			next = s.nextCertificateCheck(ctx)
			continue
		}
		if err := s.renewCertificate(ctx); err != nil {
			if errors.Is(err, errReplaced) {
				return errReplaced
			}
			next = s.opts.Clock.Now().Add(rotationRetryDelay(err, retry))
			if ctx.Err() == nil && !s.rejectedLog.LogIfRejected(ctx, err) {
				log.FromContext(ctx).Info("cannot renew the certificate for the hub yet", "reason", err.Error(), "expires", s.transport.certificate().NotAfter)
			}
			continue
		}
		retry = newRotationBackoff()
		next = s.nextCertificateCheck(ctx)
		if earliest := s.opts.Clock.Now().Add(minRotationInterval); next.Before(earliest) {
			next = earliest
		}
	}
}

func newRotationBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: minRotationRetry, Factor: 2, Jitter: 0.5, Steps: 10, Cap: maxRotationRetry}
}

// rotationRetryDelay returns the delay before the next attempt to renew, after an attempt that failed with err.
func rotationRetryDelay(err error, retry *wait.Backoff) time.Duration {
	if _, isDenied := errors.AsType[*bootstrap.DeniedError](err); isDenied {
		return session.Jitter(deniedRotationInterval)
	}
	return retry.Step()
}

// nextCertificateCheck returns the time of the next check whether the renewal is due; zero for never.
func (s *hubSession) nextCertificateCheck(ctx context.Context) time.Time {
	certificate := s.transport.certificate()
	if !s.opts.isEnabled(certRotation) {
		return time.Time{}
	}
	if certificate == nil {
		log.FromContext(ctx).Info("the kubeconfig for the hub has no certificate that could be renewed")
		return time.Time{}
	}
	renewAt, checkAt := renewalTime(certificate, s.opts.RotationThreshold), s.opts.Clock.Now().Add(s.opts.RotationInterval)
	if checkAt.Before(renewAt) {
		return checkAt
	}
	return renewAt
}

// isRenewalDue returns true if the remaining lifetime of the certificate is below the threshold.
func (s *hubSession) isRenewalDue() bool {
	return !s.opts.Clock.Now().Before(renewalTime(s.transport.certificate(), s.opts.RotationThreshold))
}

// isReplaced reads the stored kubeconfig, and returns true if it is not the one in use. It returns false if the read
// fails.
func (s *hubSession) isReplaced(ctx context.Context) bool {
	kubeconfig, _, err := s.credentials.read(ctx)
	return err == nil && !bytes.Equal(kubeconfig, s.transport.kubeconfig)
}

// renewCertificate renews the certificate. It stores the new certificate before it uses it, so that a restart at any
// time finds a valid certificate.
func (s *hubSession) renewCertificate(ctx context.Context) error {
	issued := s.pendingRenewal
	if issued == nil || !bytes.Equal(issued.oldKubeconfig, s.transport.kubeconfig) {
		var err error
		if issued, err = s.requestCertificate(ctx); err != nil {
			return err
		}
		s.pendingRenewal = issued
	}
	state := s.state
	state.lifetime = formatLifetime(issued.certificate, issued.lifetime)
	if err := s.credentials.replace(ctx, issued.oldKubeconfig, issued.newKubeconfig, state); err != nil {
		return err
	}
	s.pendingRenewal, s.state = nil, state
	if _, err := s.transport.setKubeconfig(issued.newKubeconfig); err != nil {
		return fmt.Errorf("use the renewed certificate: %w", err)
	}
	log.FromContext(ctx).Info("the certificate for the hub was renewed", "expires", issued.certificate.NotAfter)
	return nil
}

// requestCertificate requests the next certificate from the hub and waits for it. It returns errReplaced if the
// kubeconfig is replaced meanwhile.
func (s *hubSession) requestCertificate(ctx context.Context) (*renewal, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var checker sync.WaitGroup
	defer checker.Wait()
	defer cancel(nil)
	checker.Go(func() {
		for session.Sleep(ctx, s.opts.Clock, credentialCheckInterval) {
			if s.isReplaced(ctx) {
				cancel(errReplaced)
			}
		}
	})
	lifetime := min(requestedLifetime(s.transport.certificate(), s.state.lifetime), bootstrap.MaxLife)
	issued, err := bootstrap.RequestCertificate(ctx, s.transport.config, bootstrap.CertificateRequest{
		Cluster: s.opts.Cluster, Lifetime: lifetime, Until: s.opts.Clock.Now().Add(rotationTimeout),
		Progress: func(line string) { log.FromContext(ctx).Info(line) },
	})
	if errors.Is(context.Cause(ctx), errReplaced) {
		return nil, errReplaced
	}
	if err != nil {
		return nil, fmt.Errorf("renew the certificate: %w", err)
	}
	chain, err := cert.ParseCertsPEM(issued.CertPEM)
	if err != nil {
		return nil, fmt.Errorf("parse the renewed certificate: %w", err)
	}
	renewed, err := s.transport.withCertificate(issued.CertPEM, issued.KeyPEM)
	if err != nil {
		return nil, err
	}
	return &renewal{oldKubeconfig: s.transport.kubeconfig, newKubeconfig: renewed, certificate: chain[0], lifetime: lifetime}, nil
}

func (s *hubSession) sleepUntil(ctx context.Context, at time.Time) bool {
	timer := s.opts.Clock.NewTimer(max(at.Sub(s.opts.Clock.Now()), 0))
	defer timer.Stop()
	select {
	case <-timer.C():
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
