package check

import (
	"context"
	"fmt"
	"strings"

	lua "github.com/yuin/gopher-lua"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/script"
)

// maxMessage is the maximal length of a message in bytes. It is written to the status of a cluster.
const maxMessage = 1024

// Run evaluates checks in order and stops at the first one that fails. failure is "" if all pass, else "check <name>:
// <message>" of the failed check; an invalid script fails its check. An error means that a request to the cluster
// failed. member should read from the API server, because the selected objects are not needed again.
func Run(ctx context.Context, member client.Reader, checks []libv1beta1.ClusterCheck) (failure string, err error) {
	for i := range checks {
		message, err := runCheck(ctx, member, &checks[i])
		if err != nil {
			return "", fmt.Errorf("check %s: %w", checks[i].Name, err)
		}
		if message != "" {
			return singleLine("check " + checks[i].Name + ": " + message), nil
		}
	}
	return "", nil
}

// runCheck returns "" if the check passes, else the message.
func runCheck(ctx context.Context, member client.Reader, check *libv1beta1.ClusterCheck) (failure string, err error) {
	var objects []map[string]any
	for i := range check.ResourceSelectors {
		selected, err := listObjects(ctx, member, &check.ResourceSelectors[i])
		if err != nil {
			return "", err
		}
		if selected, err = filter(ctx, selected, check.ResourceSelectors[i].Evaluate); err != nil {
			return scriptFailure(ctx, fmt.Errorf("resourceSelectors[%d].evaluate: %w", i, err))
		}
		if len(check.ResourceSelectors[i].EvaluateCEL) > 0 {
			return fmt.Sprintf("resourceSelectors[%d].evaluateCEL is not supported; use evaluate", i), nil
		}
		objects = append(objects, selected...)
	}
	failure, err = evaluateCondition(ctx, check.Condition, objects)
	if err != nil {
		return scriptFailure(ctx, fmt.Errorf("condition: %w", err))
	}
	return failure, nil
}

// scriptFailure returns an error of a script as the failure of its check, unless ctx ended.
func scriptFailure(ctx context.Context, err error) (failure string, _ error) {
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	return err.Error(), nil
}

// evaluateCondition runs the condition of a check; failure is "" if it passes.
func evaluateCondition(ctx context.Context, condition string, objects []map[string]any) (failure string, err error) {
	interpreter, err := script.New(ctx, condition)
	if err != nil {
		return "", err
	}
	defer interpreter.Close()
	resources := make([]any, 0, len(objects))
	for _, object := range objects {
		resources = append(resources, object)
	}
	result, err := interpreter.Evaluate("resources", interpreter.ToLua(resources))
	if err != nil {
		return "", err
	}
	pass, err := boolField(result, "pass")
	if err != nil || pass {
		return "", err
	}
	if message := messageText(result.RawGetString("message")); message != "" {
		return message, nil
	}
	return "the check does not pass, and its script returns no message", nil
}

// filter returns the objects for which script returns matching = true, or all objects without a script.
func filter(ctx context.Context, objects []map[string]any, code string) ([]map[string]any, error) {
	if code == "" || len(objects) == 0 {
		return objects, nil
	}
	interpreter, err := script.New(ctx, code)
	if err != nil {
		return nil, err
	}
	defer interpreter.Close()
	var matching []map[string]any
	for _, object := range objects {
		result, err := interpreter.Evaluate("obj", interpreter.ToLua(object))
		if err != nil {
			return nil, err
		}
		isMatching, err := boolField(result, "matching")
		if err != nil {
			return nil, err
		}
		if isMatching {
			matching = append(matching, object)
		}
	}
	return matching, nil
}

// boolField returns a bool field of the table that a script returned.
func boolField(table *lua.LTable, name string) (bool, error) {
	value := table.RawGetString(name)
	if value == lua.LNil {
		return false, fmt.Errorf("%w: the table that evaluate returns has no field %q", script.ErrInvalid, name)
	}
	if value.Type() != lua.LTBool {
		return false, fmt.Errorf("%w: field %q of the table that evaluate returns is a %s, not a bool", script.ErrInvalid, name, value.Type())
	}
	return lua.LVAsBool(value), nil
}

// messageText returns a message, or "" if value is neither a string nor a number.
func messageText(value lua.LValue) string {
	if value.Type() != lua.LTString && value.Type() != lua.LTNumber {
		return ""
	}
	return strings.TrimSpace(value.String())
}

// singleLine returns message as one line of valid UTF-8 with at most maxMessage bytes.
func singleLine(message string) string {
	message = strings.Join(strings.Fields(strings.ToValidUTF8(message, "?")), " ")
	if len(message) > maxMessage {
		message = strings.ToValidUTF8(message[:maxMessage-3], "") + "..."
	}
	return message
}
