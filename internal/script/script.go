package script

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"
)

const (
	// scriptTimeout limits the processor time of one script.
	scriptTimeout = 5 * time.Second
	// maxRegistry limits the values on the stack of the interpreter, and maxCallDepth the depth of calls.
	maxRegistry  = 64 * 1024
	maxCallDepth = 200
	// maxArrayIndex is the highest index in the array part of a table. Missing elements below an index take memory.
	maxArrayIndex = 1 << 18
)

// limitArrays sets maxArrayIndex once, before the first script. By default, one assignment to a high index can allocate
// a gigabyte.
//
//nolint:gochecknoglobals // the interpreter keeps its limit in a package variable; this is the one place that sets it
var limitArrays = sync.OnceFunc(func() { lua.MaxArrayIndex = maxArrayIndex })

// ErrInvalid is wrapped in errors that the author of a script must correct.
var ErrInvalid = errors.New("invalid script")

// Script is one script with its interpreter, libraries and limits. It is not safe for concurrent use.
type Script struct {
	state   *lua.LState
	limiter *scriptLimiter
	// remainingText is the number of bytes of text that the script may still create.
	remainingText int
}

// New compiles and runs a script with the libraries base, table, string and math. The limits apply to New and Evaluate
// together. The caller must call Close. The error wraps ErrInvalid, or is the error of a limit or of ctx.
func New(ctx context.Context, script string) (*Script, error) {
	return newScript(ctx, script, (*Script).addLibraries)
}

func newScript(ctx context.Context, script string, addLibraries func(*Script)) (*Script, error) {
	chunk, err := parse.Parse(strings.NewReader(script), "script")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrInvalid, strings.TrimPrefix(strings.TrimSpace(err.Error()), "script "))
	}
	limitConcatenation(chunk)
	proto, err := lua.Compile(chunk, "script")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrInvalid, strings.TrimSpace(err.Error()))
	}
	limitArrays()
	s := &Script{
		state:   lua.NewState(lua.Options{SkipOpenLibs: true, CallStackSize: maxCallDepth, RegistryMaxSize: maxRegistry}),
		limiter: newScriptLimiter(ctx), remainingText: maxText,
	}
	addLibraries(s)
	s.state.SetContext(s.limiter) //nolint:contextcheck // the limiter wraps ctx
	if err := s.call(s.state.NewFunctionFromProto(proto), 0); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close ends the interpreter.
func (s *Script) Close() {
	s.state.Close()
}

// addLibraries adds the libraries for all scripts.
func (s *Script) addLibraries() {
	for _, library := range []struct {
		name string
		open lua.LGFunction
	}{
		{lua.BaseLibName, lua.OpenBase}, {lua.TabLibName, lua.OpenTable}, {lua.StringLibName, lua.OpenString}, {lua.MathLibName, lua.OpenMath},
	} {
		s.state.Push(s.state.NewFunction(library.open))
		s.state.Push(lua.LString(library.name))
		s.state.Call(1, 0)
	}
	// These read files, write to our output, load code without the limits, or access the interpreter.
	for _, name := range []string{
		"dofile", "load", "loadfile", "loadstring", "require", "module", "print", "collectgarbage", "newproxy", "getfenv", "setfenv", "_printregs",
	} {
		s.state.SetGlobal(name, lua.LNil)
	}
	s.limitStrings()
	s.limitSort()
}

// limitSort makes table.sort check the limits at each comparison. By default, a sort without a comparison function
// executes no instructions.
func (s *Script) limitSort() {
	library := s.state.GetGlobal(lua.TabLibName).(*lua.LTable)
	sort := library.RawGetString("sort").(*lua.LFunction)
	less := s.state.NewFunction(func(state *lua.LState) int {
		select {
		case <-s.limiter.Done():
			state.RaiseError("%s", s.limiter.Err())
		default:
		}
		state.Push(lua.LBool(state.LessThan(state.Get(1), state.Get(2))))
		return 1
	})
	library.RawSetString("sort", s.state.NewFunction(func(state *lua.LState) int {
		if state.GetTop() == 1 {
			state.Push(less)
		}
		return forwardCall(state, sort)
	}))
}

// Evaluate sets the variable global to value, calls the function evaluate of the script with value, and returns the
// result. Its errors are like the errors of New.
func (s *Script) Evaluate(global string, value lua.LValue) (*lua.LTable, error) {
	s.state.SetGlobal(global, value)
	function, ok := s.state.GetGlobal("evaluate").(*lua.LFunction)
	if !ok {
		return nil, fmt.Errorf("%w: function evaluate is missing", ErrInvalid)
	}
	if err := s.call(function, 1, value); err != nil {
		return nil, err
	}
	result := s.state.Get(-1)
	s.state.Pop(1)
	table, ok := result.(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("%w: evaluate returns a %s, not a table", ErrInvalid, result.Type())
	}
	return table, nil
}

// call calls function, and leaves this number of results on the stack. The same failure always gives the same message.
func (s *Script) call(function *lua.LFunction, results int, arguments ...lua.LValue) error {
	err := s.state.CallByParam(lua.P{Fn: function, NRet: results, Protect: true}, arguments...)
	if err == nil {
		return nil
	}
	var raised *lua.ApiError
	isRaised := errors.As(err, &raised)
	if limitErr := s.limiter.Err(); limitErr != nil {
		// The other limits can end the same script at another line the next time.
		if line := lineOf(raised); line != "" && errors.Is(limitErr, errSteps) {
			return fmt.Errorf("line %s: %w", line, limitErr)
		}
		return limitErr
	}
	if !isRaised {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	// Only text and numbers are shown. The text of a table has its address, which differs each time.
	message := "it raised a value that is not text"
	if raised.Object != nil && (raised.Object.Type() == lua.LTString || raised.Object.Type() == lua.LTNumber) {
		message = raised.Object.String()
		if position, found := strings.CutPrefix(message, "script:"); found {
			message = "line " + position
		}
	}
	return fmt.Errorf("%w: %s", ErrInvalid, message)
}

// lineOf returns the line at which a script was stopped, "" if it is unknown.
func lineOf(raised *lua.ApiError) string {
	if raised == nil || raised.Object == nil {
		return ""
	}
	position, _ := strings.CutPrefix(raised.Object.String(), "script:")
	line, _, _ := strings.Cut(position, ":")
	if _, err := strconv.Atoi(line); err != nil {
		return ""
	}
	return line
}

// ToLua converts a part of an unstructured object. Null becomes nil, so that the field is missing.
func (s *Script) ToLua(part any) lua.LValue {
	switch part := part.(type) {
	case map[string]any:
		table := s.state.NewTable()
		for _, key := range slices.Sorted(maps.Keys(part)) { // the function pairs returns the keys in this order
			table.RawSetString(key, s.ToLua(part[key]))
		}
		return table
	case []any:
		table := s.state.NewTable()
		for _, entry := range part {
			table.Append(s.ToLua(entry))
		}
		return table
	case string:
		return lua.LString(part)
	case bool:
		return lua.LBool(part)
	case int64:
		return lua.LNumber(part)
	case float64:
		return lua.LNumber(part)
	default:
		return lua.LNil
	}
}
