package check

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Result is the result of a cluster's checks.
type Result struct {
	// Ready is true if the readiness checks have passed, now or earlier.
	Ready bool
	// Failure is "readiness check <name>: <message>" or "liveness check <name>: <message>" of the first check that
	// fails, or that returns an error; "" if all pass. It is one line of at most maxMessage bytes.
	Failure string
}

// EvaluateCluster runs the liveness checks of spec, and before them the readiness checks if ready is false. ready is
// the Ready of the previous Result. EvaluateCluster returns an error only if a script could not be run: the cluster may
// be healthy. The caller must ignore the result if ctx has ended.
func (c Checker) EvaluateCluster(ctx context.Context, member client.Reader, spec *libv1beta1.SveltosClusterSpec, ready bool) (Result, error) {
	if !ready {
		if failure, err := c.failureOf(ctx, member, "readiness", spec.ReadinessChecks); failure != "" || err != nil {
			return Result{Failure: failure}, err
		}
	}
	failure, err := c.failureOf(ctx, member, "liveness", spec.LivenessChecks)
	return Result{Ready: true, Failure: failure}, err
}

// failureOf returns the Result.Failure of one list of checks. kind is "readiness" or "liveness".
func (c Checker) failureOf(ctx context.Context, member client.Reader, kind string, checks []libv1beta1.ClusterCheck) (failure string, err error) {
	failure, err = c.Run(ctx, member, checks)
	if isResourceShortage(err) {
		return "", err
	}
	if err != nil {
		failure = err.Error()
	}
	if failure == "" {
		return "", nil
	}
	return singleLine(kind + " " + failure), nil
}
