package check

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
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
// result is invalid if ctx has ended.
func (c Checker) EvaluateCluster(ctx context.Context, member client.Reader, spec *libv1beta1.SveltosClusterSpec, ready bool) Result {
	if !ready {
		if failure := c.runList(ctx, member, "readiness ", spec.ReadinessChecks); failure != "" {
			return Result{Failure: failure}
		}
	}
	return Result{Ready: true, Failure: c.runList(ctx, member, "liveness ", spec.LivenessChecks)}
}

func (c Checker) runList(ctx context.Context, member client.Reader, prefix string, checks []libv1beta1.ClusterCheck) string {
	failure, err := c.Run(ctx, member, checks)
	if err != nil {
		failure = singleLine(err.Error())
	}
	if failure == "" {
		return ""
	}
	return prefix + failure
}
