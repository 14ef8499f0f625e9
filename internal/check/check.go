package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/sandbox"
)

// maxMessage is the maximum length of a message in bytes. Messages are written to the status of a cluster.
const maxMessage = 1024

// Checker runs the checks of one cluster.
type Checker struct {
	// Sandbox runs the scripts. If it is nil, they run in this process, and all its work counts against their limit of
	// memory. Only tests do that.
	Sandbox *sandbox.Pool
	// Cluster is the namespace and the name of the cluster. After a script has exceeded a limit of the sandbox, it is not
	// run again for this cluster for some time. If it exceeds a limit for several clusters of a namespace, it is not run
	// for any of them. Clusters of other namespaces are not affected, since they have other users.
	Cluster client.ObjectKey
}

// Run evaluates checks in order and stops at the first one that fails. failure is "" if all pass, else "check <name>:
// <message>" of the failed check; an invalid script fails its check. An error means that the objects could not be
// listed, or that a script could not be run. member must not be a cache, which would keep all listed objects.
func (c Checker) Run(ctx context.Context, member client.Reader, checks []libv1beta1.ClusterCheck) (failure string, err error) {
	for i := range checks {
		message, err := c.runCheck(ctx, member, &checks[i])
		if err != nil {
			return "", fmt.Errorf("check %s: %w", checks[i].Name, err)
		}
		if message != "" {
			return singleLine("check " + checks[i].Name + ": " + message), nil
		}
	}
	return "", nil
}

// runCheck returns "" if the check passes, else the message of the failure.
func (c Checker) runCheck(ctx context.Context, member client.Reader, check *libv1beta1.ClusterCheck) (failure string, err error) {
	var objects []json.RawMessage
	size := 0
	for i := range check.ResourceSelectors {
		selector := &check.ResourceSelectors[i]
		if len(selector.EvaluateCEL) > 0 {
			return fmt.Sprintf("resourceSelectors[%d].evaluateCEL is not supported; use evaluate", i), nil
		}
		listed, err := listObjects(ctx, member, selector)
		if err != nil {
			return "", err
		}
		selected, err := c.filter(ctx, listed, selector.Evaluate)
		if err != nil {
			return scriptFailure(ctx, fmt.Errorf("resourceSelectors[%d].evaluate: %w", i, err))
		}
		for _, object := range selected {
			size += len(object)
		}
		if size > maxObjectsSize {
			return "", fmt.Errorf("the objects of its selectors have more than %d MiB", maxObjectsSize>>20)
		}
		objects = append(objects, selected...)
	}
	if failure, err = c.evaluateCondition(ctx, check.Condition, objects); err != nil {
		return scriptFailure(ctx, fmt.Errorf("condition: %w", err))
	}
	return failure, nil
}

// scriptFailure converts the error of a script to the failure of its check. It returns an error if ctx has ended, or if
// the script could not be run.
func scriptFailure(ctx context.Context, err error) (failure string, _ error) {
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	if isResourceShortage(err) {
		return "", err
	}
	return err.Error(), nil
}

// isResourceShortage returns whether err means that the script was not run, or not to its end, for lack of a process or
// of memory. The script may be valid.
func isResourceShortage(err error) bool {
	return errors.Is(err, sandbox.ErrStart) || errors.Is(err, sandbox.ErrMemory) || kube.IsMemoryError(err)
}

// singleLine returns message as one line of valid UTF-8 with at most maxMessage bytes.
func singleLine(message string) string {
	message = strings.Join(strings.Fields(strings.ToValidUTF8(message, "?")), " ")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	return message
}
