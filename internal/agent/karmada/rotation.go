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
	// rotationLimit is how long the hub may take to issue a certificate.
	rotationLimit = 5 * time.Minute
	// rotationPause is the least time between two renewals, however short the certificate's life.
	rotationPause = 5 * time.Second
	// retryRotationFirst and retryRotationLast bound the growing time between attempts to renew.
	retryRotationFirst = time.Second
	retryRotationLast  = time.Minute
)

// renewal is a certificate that was issued, and is not in use before it is kept.
type renewal struct {
	// used is the kubeconfig that it comes after, and renewed that with the certificate.
	used, renewed []byte
	certificate   *x509.Certificate
	life          time.Duration
}

// watchWay renews the certificate in time, until ctx ends; it returns errReplaced when somebody has put another way to the hub in the place
// of the one in use.
func (l *link) watchWay(ctx context.Context) error {
	retry := newRotationBackoff()
	next := l.nextRotation(ctx)
	for {
		wake := l.opts.Clock.Now().Add(lookAgain)
		if !next.IsZero() && next.Before(wake) {
			wake = next
		}
		if !l.sleepUntil(ctx, wake) {
			return nil
		}
		if !l.opts.runs(clusterStatus) {
			l.metrics.Watchdog.Reset()
		}
		if l.replaced(ctx) {
			return errReplaced
		}
		if next.IsZero() || l.opts.Clock.Now().Before(next) {
			continue
		}
		if !l.dueNow() {
			next = l.nextRotation(ctx)
			continue
		}
		if err := l.rotate(ctx); err != nil {
			if errors.Is(err, errReplaced) {
				return errReplaced
			}
			next = l.opts.Clock.Now().Add(retry.Step())
			if ctx.Err() == nil && !l.refusal.LogIfRejected(ctx, err) {
				log.FromContext(ctx).Info("cannot renew the certificate for the hub yet", "reason", err.Error(), "expires", l.way.certificate().NotAfter)
			}
			continue
		}
		retry = newRotationBackoff()
		next = l.nextRotation(ctx)
		if least := l.opts.Clock.Now().Add(rotationPause); next.Before(least) {
			next = least
		}
	}
}

func newRotationBackoff() *wait.Backoff {
	return &wait.Backoff{Duration: retryRotationFirst, Factor: 2, Jitter: 0.5, Steps: 10, Cap: retryRotationLast}
}

// nextRotation is when to look next whether the certificate is to be renewed; zero for never.
func (l *link) nextRotation(ctx context.Context) time.Time {
	certificate := l.way.certificate()
	if !l.opts.runs(certRotation) {
		return time.Time{}
	}
	if certificate == nil {
		log.FromContext(ctx).Info("the kubeconfig for the hub has no certificate that could be renewed")
		return time.Time{}
	}
	at, look := due(certificate, l.opts.RotationThreshold), l.opts.Clock.Now().Add(l.opts.RotationInterval)
	if look.Before(at) {
		return look
	}
	return at
}

// dueNow says whether no more remains of the certificate's life than the options say.
func (l *link) dueNow() bool {
	return !l.opts.Clock.Now().Before(due(l.way.certificate(), l.opts.RotationThreshold))
}

// replaced says whether the kubeconfig is another one than that in use. What cannot be read is not.
func (l *link) replaced(ctx context.Context) bool {
	kubeconfig, _, err := l.home.read(ctx)
	return err == nil && !bytes.Equal(kubeconfig, l.way.kubeconfig)
}

// rotate renews the certificate. The new one is kept before it is used, so that a start at any moment finds one that works; from then on every
// request presents it.
func (l *link) rotate(ctx context.Context) error {
	made := l.pending
	if made == nil || !bytes.Equal(made.used, l.way.kubeconfig) {
		var err error
		if made, err = l.request(ctx); err != nil {
			return err
		}
		l.pending = made
	}
	known := l.kept
	known.life = noteLife(made.certificate, made.life)
	if err := l.home.renew(ctx, made.used, made.renewed, known); err != nil {
		return err
	}
	l.pending, l.kept = nil, known
	if _, err := l.way.take(made.renewed); err != nil {
		return fmt.Errorf("use the renewed certificate: %w", err)
	}
	log.FromContext(ctx).Info("the certificate for the hub was renewed", "expires", made.certificate.NotAfter)
	return nil
}

// request asks the hub for the next certificate. It returns errReplaced when nobody needs that any more.
func (l *link) request(ctx context.Context) (*renewal, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	var looking sync.WaitGroup
	defer looking.Wait()
	defer cancel(nil)
	looking.Go(func() {
		for session.Sleep(ctx, l.opts.Clock, lookAgain) {
			if l.replaced(ctx) {
				cancel(errReplaced)
			}
		}
	})
	life := lifeOf(l.way.certificate(), l.kept.life)
	issued, err := bootstrap.RequestCertificate(ctx, l.way.config, bootstrap.CertificateRequest{
		Cluster: l.opts.Cluster, Life: life, Until: l.opts.Clock.Now().Add(rotationLimit),
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
	renewed, err := l.way.with(issued.CertPEM, issued.KeyPEM)
	if err != nil {
		return nil, err
	}
	return &renewal{used: l.way.kubeconfig, renewed: renewed, certificate: chain[0], life: life}, nil
}

func (l *link) sleepUntil(ctx context.Context, at time.Time) bool {
	timer := l.opts.Clock.NewTimer(max(at.Sub(l.opts.Clock.Now()), 0))
	defer timer.Stop()
	select {
	case <-timer.C():
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
