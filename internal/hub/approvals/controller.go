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
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/towline/towline/internal/join/bootstrap"
	"github.com/towline/towline/internal/phase"
)

const (
	// workers is how many requests are answered at once. Each takes about two dozen requests to the API server.
	workers = 5
	// retryFirst and retryMost are the first and the longest pause before a failed attempt is repeated: somebody waits for the answer.
	retryFirst = 200 * time.Millisecond
	retryMost  = 10 * time.Second
)

// Controller answers the CertificateSigningRequests of agents. It approves one that asks for what an agent may have, from somebody who may have it,
// and makes the Cluster and the rights of the agent first. It denies, with a reason, any other one that is about agents, and leaves those alone
// that are not.
type Controller struct {
	// Hub reads CertificateSigningRequests from a cache, see Cached; Live reads from the API server.
	Hub    client.Client
	Live   client.Client
	Events events.EventRecorder
	Clock  clock.Clock
}

// Cached says which CertificateSigningRequests the cache of the hub's manager has to hold: those for the signer of agents.
func Cached() (client.Object, cache.ByObject) {
	return &certificatesv1.CertificateSigningRequest{}, cache.ByObject{Field: fields.OneTermEqualSelector("spec.signerName", bootstrap.Signer)}
}

// Setup makes mgr run the controller.
func (c *Controller) Setup(_ context.Context, mgr ctrl.Manager) error {
	if err := c.settling(mgr); err != nil {
		return err
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("approvals").
		For(&certificatesv1.CertificateSigningRequest{}, builder.WithPredicates(unanswered())).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: workers,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		}).
		Complete(c)
}

// unanswered passes requests that nobody has answered.
func unanswered() predicate.Predicate {
	pending := predicate.NewPredicateFuncs(func(obj client.Object) bool {
		csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
		return ok && csr.Spec.SignerName == bootstrap.Signer && open(csr)
	})
	return predicate.And(pending, predicate.Funcs{DeleteFunc: func(event.DeleteEvent) bool { return false }})
}

// open says whether a request has no answer yet.
func open(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) == 0 && len(csr.Status.Certificate) == 0 && csr.DeletionTimestamp.IsZero()
}

// Reconcile answers one request.
func (c *Controller) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	csr := &certificatesv1.CertificateSigningRequest{}
	if err := c.Hub.Get(ctx, req.NamespacedName, csr); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	petition, ours, malformed := bootstrap.Judge(csr)
	if !ours || !open(csr) {
		return reconcile.Result{}, nil
	}
	ctx = log.IntoContext(ctx, log.FromContext(ctx).WithValues("csr", csr.Name, "requester", csr.Spec.Username))
	s := &state{csr: csr, petition: petition}
	steps := []phase.Step[*state]{
		{Name: "judge", Run: func(context.Context, *state) error { return denied(bootstrap.ReasonMalformed, malformed) }},
		{Name: "in time", Run: c.inTime},
		{Name: "few", Run: c.few},
		{Name: "authorize", Run: c.authorize},
		{Name: "guard", Run: c.guard},
	}
	if petition.Renewal {
		steps = append(steps, phase.Step[*state]{Name: "find", Run: c.find})
	} else {
		steps = append(steps,
			phase.Step[*state]{Name: "bind", Run: c.bind},
			phase.Step[*state]{Name: "enroll", Run: c.enroll},
			phase.Step[*state]{Name: "grant", Run: c.grant},
			phase.Step[*state]{Name: "in time", Run: c.inTime})
	}
	outcome := phase.Run(ctx, s, append(steps, phase.Step[*state]{Name: "let read", Run: c.letRead}, phase.Step[*state]{Name: "approve", Run: c.approve}))
	return c.end(ctx, s, outcome)
}

// end denies what was rejected, and has anything else that failed tried again.
func (c *Controller) end(ctx context.Context, s *state, outcome phase.Outcome) (reconcile.Result, error) {
	err := outcome.Err
	var denial *bootstrap.Denied
	if errors.As(err, &denial) {
		err = c.deny(ctx, s, denial)
	}
	switch {
	case err == nil:
		return reconcile.Result{}, nil
	case apierrors.IsConflict(err):
		// Somebody else wrote first. If that was an answer, the cache will tell.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	case outcome.Kind == phase.Waiting:
		return reconcile.Result{RequeueAfter: outcome.After}, nil
	}
	return reconcile.Result{}, fmt.Errorf("answer CertificateSigningRequest %s: %w", s.csr.Name, err)
}
