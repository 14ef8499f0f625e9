package check

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	lua "github.com/yuin/gopher-lua"

	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/script"
)

// callTimeout is the limit of the time of a call in the sandbox. It is longer than the limit of package script. That
// limit is checked between instructions only: it does not stop a slow compilation, or one instruction without end.
const callTimeout = 15 * time.Second

// The names of the functions in the sandbox.
const (
	filterFunction    = "filter of a check"
	conditionFunction = "condition of a check"
)

// evaluation is the input of a function: a script, and its objects.
type evaluation struct {
	Script  string
	Objects []json.RawMessage
}

// Functions returns the functions of the sandbox that Checker.Sandbox needs.
func Functions() map[string]sandbox.Function {
	return map[string]sandbox.Function{
		filterFunction:    asSandboxFunction(evaluation.matchingIndexes),
		conditionFunction: asSandboxFunction(evaluation.conditionFailure),
	}
}

// asSandboxFunction returns a function of the sandbox that decodes its input and calls function.
func asSandboxFunction[Result any](function func(evaluation) (Result, error)) sandbox.Function {
	return func(input json.RawMessage, _ func(any) (json.RawMessage, error)) (any, error) {
		var e evaluation
		if err := json.Unmarshal(input, &e); err != nil {
			return nil, err
		}
		return function(e)
	}
}

// filter returns the objects for which script returns matching = true, or all objects if script is "".
func (c Checker) filter(ctx context.Context, objects []json.RawMessage, script string) ([]json.RawMessage, error) {
	if script == "" || len(objects) == 0 {
		return objects, nil
	}
	indexes, err := callFunction(ctx, c, filterFunction, evaluation{script, objects}, evaluation.matchingIndexes)
	if err != nil {
		return nil, err
	}
	matching := make([]json.RawMessage, 0, len(indexes))
	for _, i := range indexes {
		// A script may control the child: a wrong index must not end this process.
		if i < 0 || i >= len(objects) {
			return nil, fmt.Errorf("the sandbox returned index %d of %d objects", i, len(objects))
		}
		matching = append(matching, objects[i])
	}
	return matching, nil
}

// evaluateCondition runs the condition of a check; failure is "" if it passes.
func (c Checker) evaluateCondition(ctx context.Context, script string, objects []json.RawMessage) (failure string, err error) {
	return callFunction(ctx, c, conditionFunction, evaluation{script, objects}, evaluation.conditionFailure)
}

// callFunction calls one of the functions, in the sandbox if there is one. After the end of ctx it returns the error of
// ctx: a cluster can have thousands of checks, and each call takes up to callTimeout.
func callFunction[Result any](ctx context.Context, c Checker, name string, e evaluation, function func(evaluation) (Result, error)) (result Result, err error) {
	if ctx.Err() != nil {
		return result, ctx.Err()
	}
	if c.Sandbox == nil {
		return function(e)
	}
	memory := c.Sandbox.Memory().Reserve(c.Cluster.Namespace)
	defer memory.Release()
	err = memory.Retry(ctx, func() error {
		return c.Sandbox.Call(sandbox.Call{
			Function: name, Memory: memory, Scope: "checks " + c.Cluster.Namespace, Key: fmt.Sprintf("%s %x", name, sha256.Sum256([]byte(e.Script))),
			Member: c.Cluster.String(), Limit: callTimeout, Input: e, Output: &result,
		})
	})
	return result, err
}

// matchingIndexes returns the indexes of the objects for which the script returns matching = true.
func (e evaluation) matchingIndexes() (indexes []int, err error) {
	interpreter, err := script.New(context.Background(), e.Script)
	if err != nil {
		return nil, err
	}
	defer interpreter.Close()
	for i := range e.Objects {
		object, err := decodeObject(e.Objects[i])
		if err != nil {
			return nil, err
		}
		result, err := interpreter.Evaluate("obj", interpreter.ToLua(object))
		if err != nil {
			return nil, err
		}
		isMatching, err := boolField(result, "matching")
		if err != nil {
			return nil, err
		}
		if isMatching {
			indexes = append(indexes, i)
		}
	}
	return indexes, nil
}

// conditionFailure runs the script of a condition. It returns its message, "" if the condition passes.
func (e evaluation) conditionFailure() (failure string, err error) {
	interpreter, err := script.New(context.Background(), e.Script)
	if err != nil {
		return "", err
	}
	defer interpreter.Close()
	resources := make([]any, 0, len(e.Objects))
	for i := range e.Objects {
		object, err := decodeObject(e.Objects[i])
		if err != nil {
			return "", err
		}
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

// decodeObject decodes an object with the Go types that ToLua of the interpreter accepts.
func decodeObject(raw json.RawMessage) (object map[string]any, err error) {
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, fmt.Errorf("decode an object: %w", err)
	}
	return object, nil
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
	return strings.TrimSpace(strings.ToValidUTF8(value.String(), "?")) // JSON has only valid UTF-8
}
