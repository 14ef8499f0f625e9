package approvals

import (
	"context"
	"errors"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"k8s.io/utils/lru"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/towline/towline/internal/hub/ratelimit"
	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is the number of concurrent reconciles. Each sends about 24 requests to the API server.
	workers = 5
	// minRetryDelay and maxRetryDelay limit the delay before a failed reconcile is retried. They are short, because the
	// requester waits for the answer.
	minRetryDelay = 200 * time.Millisecond
	maxRetryDelay = 10 * time.Second
	// requestBurst is the number of requests that one requester can create at once. Afterwards one request is processed
	// per requestInterval, and the others are denied. A registration or renewal needs one request, and one for each retry.
	requestBurst    = 20
	requestInterval = 10 * time.Second
	// maxCounted is the maximum number of UIDs in Controller.countedUIDs.
	maxCounted = 10_000
)

// Controller answers the CertificateSigningRequests of agents. It approves a valid request of an authorized requester
// after it has created the Cluster and the agent's RBAC. It denies all other requests for agent certificates, with a
// reason. It ignores requests that are not for an agent certificate.
type Controller struct {
	// Hub reads CertificateSigningRequests from a cache with CacheOptions. Live reads from the API server, and writes.
	Hub    client.Client
	Live   client.Client
	Events events.EventRecorder
	Clock  clock.Clock

	// limiter limits the requests of each requester. countedUIDs has the UIDs of the requests that it has allowed. Setup
	// sets both; without Setup, in tests, there is no limit.
	limiter     *ratelimit.Limiter
	countedUIDs *lru.Cache
}

// CacheOptions returns the cache options for CertificateSigningRequests. The hub's manager must use them: the cache
// then contains only requests for the signer of agents.
func CacheOptions() (client.Object, cache.ByObject) {
	return &certificatesv1.CertificateSigningRequest{}, cache.ByObject{Field: fields.OneTermEqualSelector("spec.signerName", bootstrap.Signer)}
}

// Setup adds this controller and the one that completes registrations to mgr. It is called once, before mgr starts.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	c.limiter, c.countedUIDs = ratelimit.New(requestInterval, requestBurst, c.Clock), lru.New(maxCounted)
	if err := c.setupCompletion(mgr); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("approvals").
		For(&certificatesv1.CertificateSigningRequest{}, builder.WithPredicates(pendingRequests())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](minRetryDelay, maxRetryDelay),
		}).
		Complete(c)
}

// countRequest counts a request and returns whether its requester has exceeded the limit. Without the limit one
// requester could occupy all workers. Each request counts once, at its first reconcile.
func (c *Controller) countRequest(csr *certificatesv1.CertificateSigningRequest) (exceedsLimit bool) {
	if c.limiter == nil {
		return false
	}
	if _, isCounted := c.countedUIDs.Get(csr.UID); isCounted {
		return false
	}
	if !c.limiter.Allow(csr.Spec.Username) {
		return true
	}
	c.countedUIDs.Add(csr.UID, true)
	return false
}

// pendingRequests selects events about requests without an answer.
func pendingRequests() predicate.Predicate {
	selector := predicate.NewPredicateFuncs(func(obj client.Object) bool {
		csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
		return ok && csr.Spec.SignerName == bootstrap.Signer && isPending(csr)
	})
	return predicate.And(selector, predicate.Funcs{DeleteFunc: func(event.DeleteEvent) bool { return false }})
}

// isPending returns whether a request has no answer and is not being deleted.
func isPending(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) == 0 && len(csr.Status.Certificate) == 0 && csr.DeletionTimestamp.IsZero()
}

// Reconcile answers one CertificateSigningRequest.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	csr := &certificatesv1.CertificateSigningRequest{}
	if err := c.Hub.Get(ctx, req.NamespacedName, csr); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	parsed, isForAgent, validationErr := ValidateCSR(csr)
	if !isForAgent || !isPending(csr) {
		return reconcile.Result{}, nil
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("csr", csr.Name, "requester", csr.Spec.Username))
	s := &state{csr: csr, parsed: parsed}
	if exceedsLimit := c.countRequest(csr); exceedsLimit {
		// Deny with one request to the API server: without grantRead, so the requester cannot read the denial.
		return reconcile.Result{}, c.setCondition(ctx, s, certificatesv1.CertificateDenied, &bootstrap.DeniedError{
			Reason: bootstrap.ReasonTooManyRequests, Message: csr.Spec.Username + " creates too many requests; request again later",
		})
	}
	steps := []phase.Step[*state]{
		{Name: "validate", Run: func(context.Context, *state) error { return denied(bootstrap.ReasonInvalidRequest, validationErr) }},
		{Name: "check deadline", Run: c.checkDeadline},
		{Name: "check request count", Run: c.checkRequestCount},
		{Name: "authorize", Run: c.authorize},
		{Name: "ensure policy", Run: c.ensurePolicy},
	}
	if parsed.Renewal {
		steps = append(steps, phase.Step[*state]{Name: "find cluster", Run: c.findCluster})
	} else {
		steps = append(steps,
			phase.Step[*state]{Name: "reserve token", Run: c.reserveToken},
			phase.Step[*state]{Name: "ensure cluster", Run: c.ensureCluster},
			phase.Step[*state]{Name: "ensure agent RBAC", Run: c.ensureAgentRBAC},
			phase.Step[*state]{Name: "check deadline", Run: c.checkDeadline})
	}
	outcome := phase.Run(ctx, s, append(steps, phase.Step[*state]{Name: "grant read", Run: c.grantRead}, phase.Step[*state]{Name: "approve", Run: c.approve}))
	return c.finish(ctx, s, outcome)
}

// finish denies the request if a step returned a DeniedError. It returns other errors, so that they are retried.
func (c *Controller) finish(ctx context.Context, s *state, outcome phase.Outcome) (reconcile.Result, error) {
	err := outcome.Err
	var denial *bootstrap.DeniedError
	if errors.As(err, &denial) {
		err = c.deny(ctx, s, denial)
	}
	switch {
	case err == nil:
		return reconcile.Result{}, nil
	case apierrors.IsConflict(err):
		// Another client has changed an object, or has answered the request. The next reconcile reads the change.
		return reconcile.Result{RequeueAfter: minRetryDelay}, nil
	case outcome.Kind == phase.Waiting:
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	}
	return reconcile.Result{}, fmt.Errorf("answer CertificateSigningRequest %s: %w", s.csr.Name, err)
}
