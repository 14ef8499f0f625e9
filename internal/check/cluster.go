package check

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/sandbox"
)

// Result is the result of a cluster's checks.
type Result struct {
	// Ready is true if the cluster is ready. It stays true once it is.
	Ready bool
	// Failure is "readiness check <name>: <message>" or "liveness check <name>: <message>" of the first check that
	// fails or whose requests fail; "" if all pass.
	Failure string
}

// EvaluateCluster runs the readiness checks of spec, unless ready is true already, and then the liveness checks. The
// result is invalid if ctx has ended. It returns an error only if the checks could not be run: the
// cluster may be healthy.
func (c Checker) EvaluateCluster(ctx context.Context, member client.Reader, spec *libv1beta1.SveltosClusterSpec, ready bool) (Result, error) {
	if !ready {
		if failure, err := c.runList(ctx, member, "readiness ", spec.ReadinessChecks); failure != "" || err != nil {
			return Result{Failure: failure}, err
		}
	}
	failure, err := c.runList(ctx, member, "liveness ", spec.LivenessChecks)
	return Result{Ready: true, Failure: failure}, err
}

func (c Checker) runList(ctx context.Context, member client.Reader, prefix string, checks []libv1beta1.ClusterCheck) (failure string, err error) {
	failure, err = c.Run(ctx, member, checks)
	if errors.Is(err, sandbox.ErrStart) {
		return "", err
	}
	if err != nil {
		failure = singleLine(err.Error())
	}
	if failure == "" {
		return "", nil
	}
	return prefix + failure, nil
}
