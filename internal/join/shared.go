package join

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// MakeSharedRole makes the Role in kube.AgentNamespace by which agents read a shared bundle whose name they know, and
// returns its name. The namespace must exist.
func MakeSharedRole(ctx context.Context, hub client.Client) (name string, err error) {
	return sharedRole, (&ledger{hubClient: hub}).makeSharedRole(ctx)
}
