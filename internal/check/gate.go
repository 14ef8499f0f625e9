package check

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Verdict is what the checks of a cluster say of it.
type Verdict struct {
	// Ready says that the cluster is ready. It stays true once it is.
	Ready bool
	// Failure is "readiness check <name>: <message>" or "liveness check <name>: <message>" of the first check that does not hold, or
	// could not be asked about; "" if all hold.
	Failure string
}

// Gate asks the cluster behind member whether it is ready, by the readiness checks of spec unless ready says that it is already, and then
// whether it is healthy, by the liveness checks. The verdict means nothing once ctx has ended.
func Gate(ctx context.Context, member client.Reader, spec *libv1beta1.SveltosClusterSpec, ready bool) Verdict {
	if !ready {
		if failure := gate(ctx, member, "readiness ", spec.ReadinessChecks); failure != "" {
			return Verdict{Failure: failure}
		}
	}
	return Verdict{Ready: true, Failure: gate(ctx, member, "liveness ", spec.LivenessChecks)}
}

func gate(ctx context.Context, member client.Reader, list string, checks []libv1beta1.ClusterCheck) string {
	failure, err := Run(ctx, member, checks)
	if err != nil {
		failure = legible(err.Error())
	}
	if failure == "" {
		return ""
	}
	return list + failure
}
