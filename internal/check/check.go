package check

import (
	"context"
	"errors"
	"fmt"
	"strings"

	lua "github.com/yuin/gopher-lua"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// messageLimit is how long a failure may be, in bytes. It is kept in the status of a cluster and read by people.
const messageLimit = 1024

// errUnclear ends what a script says is wrong with itself.
var errUnclear = errors.New("the script is wrong")

// Run asks the cluster behind member whether checks hold, in their order, and stops at the first that does not. failure is "" if all
// hold, and "check <name>: <message>" of that first one otherwise; a script that cannot be run, or that says nothing clear, does not hold.
// An error means that the cluster could not be asked. member should read from the API server: what a check selects is not kept.
func Run(ctx context.Context, member client.Reader, checks []libv1beta1.ClusterCheck) (failure string, err error) {
	for i := range checks {
		message, err := run(ctx, member, &checks[i])
		if err != nil {
			return "", fmt.Errorf("check %s: %w", checks[i].Name, err)
		}
		if message != "" {
			return legible("check " + checks[i].Name + ": " + message), nil
		}
	}
	return "", nil
}

// run returns "" if the check holds.
func run(ctx context.Context, member client.Reader, check *libv1beta1.ClusterCheck) (failure string, err error) {
	var objects []map[string]any
	for i := range check.ResourceSelectors {
		selected, err := list(ctx, member, &check.ResourceSelectors[i])
		if err != nil {
			return "", err
		}
		if selected, err = filter(ctx, selected, check.ResourceSelectors[i].Evaluate); err != nil {
			return broken(ctx, fmt.Errorf("resourceSelectors[%d].evaluate: %w", i, err))
		}
		if len(check.ResourceSelectors[i].EvaluateCEL) > 0 {
			return fmt.Sprintf("resourceSelectors[%d].evaluateCEL is not supported; use evaluate", i), nil
		}
		objects = append(objects, selected...)
	}
	verdict, err := judge(ctx, check.Condition, objects)
	if err != nil {
		return broken(ctx, fmt.Errorf("condition: %w", err))
	}
	return verdict, nil
}

// broken tells a script that is wrong, which is a failure of its check, from the end of ctx, which is none.
func broken(ctx context.Context, err error) (failure string, _ error) {
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	return err.Error(), nil
}

// judge runs the condition of a check; failure is "" if it passes.
func judge(ctx context.Context, condition string, objects []map[string]any) (failure string, err error) {
	box, err := newSandbox(ctx, condition)
	if err != nil {
		return "", err
	}
	defer box.close()
	resources := box.state.NewTable()
	for _, object := range objects {
		resources.Append(box.value(object))
	}
	answer, err := box.evaluate("resources", resources)
	if err != nil {
		return "", err
	}
	pass, err := flag(answer, "pass")
	if err != nil || pass {
		return "", err
	}
	if message := text(answer.RawGetString("message")); message != "" {
		return message, nil
	}
	return "it does not pass, and its script gives no message", nil
}

// filter returns those objects that script calls matching; without a script all are.
func filter(ctx context.Context, objects []map[string]any, script string) ([]map[string]any, error) {
	if script == "" || len(objects) == 0 {
		return objects, nil
	}
	box, err := newSandbox(ctx, script)
	if err != nil {
		return nil, err
	}
	defer box.close()
	var matching []map[string]any
	for _, object := range objects {
		answer, err := box.evaluate("obj", box.value(object))
		if err != nil {
			return nil, err
		}
		match, err := flag(answer, "matching")
		if err != nil {
			return nil, err
		}
		if match {
			matching = append(matching, object)
		}
	}
	return matching, nil
}

// flag reads a bool of what a script answered.
func flag(answer *lua.LTable, name string) (bool, error) {
	value := answer.RawGetString(name)
	if value == lua.LNil {
		return false, fmt.Errorf("%w: the table that evaluate returns has no field %q", errUnclear, name)
	}
	if value.Type() != lua.LTBool {
		return false, fmt.Errorf("%w: field %q of the table that evaluate returns is a %s, not a bool", errUnclear, name, value.Type())
	}
	return lua.LVAsBool(value), nil
}

// text reads a message; what is no text is none.
func text(value lua.LValue) string {
	if value.Type() != lua.LTString && value.Type() != lua.LTNumber {
		return ""
	}
	return strings.TrimSpace(value.String())
}

// legible makes of a message what JSON carries unchanged and people can read, on one line.
func legible(message string) string {
	message = strings.Join(strings.Fields(strings.ToValidUTF8(message, "?")), " ")
	if len(message) > messageLimit {
		message = strings.ToValidUTF8(message[:messageLimit-3], "") + "..."
	}
	return message
}
