package check

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/parse"
)

const (
	// scriptLimit is how long one script may run.
	scriptLimit = 5 * time.Second
	// registryLimit is how many values a script may have on its stack, and depthLimit how deep its functions may call each other.
	registryLimit = 64 * 1024
	depthLimit    = 200
	// arrayLimit is the highest index of a table's array part: below it, gaps in an array take memory.
	arrayLimit = 1 << 18
)

// limitArrays sets the interpreter's own limit, once, before its first use: by default one assignment may take a gigabyte.
//
//nolint:gochecknoglobals // the interpreter keeps its limit in a package variable; this is the one place that sets it
var limitArrays = sync.OnceFunc(func() { lua.MaxArrayIndex = arrayLimit })

// sandbox is one script with nothing but tables, strings and numbers at hand, and limits on what it may take.
type sandbox struct {
	state *lua.LState
	meter *meter
	end   context.CancelFunc
}

// newSandbox reads a script. What is wrong with it is the error's text.
func newSandbox(ctx context.Context, script string) (*sandbox, error) {
	chunk, err := parse.Parse(strings.NewReader(script), "script")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", errUnclear, strings.TrimPrefix(strings.TrimSpace(err.Error()), "script "))
	}
	limitConcatenation(chunk)
	proto, err := lua.Compile(chunk, "script")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", errUnclear, strings.TrimSpace(err.Error()))
	}
	limitArrays()
	ctx, cancel := context.WithTimeout(ctx, scriptLimit)
	box := &sandbox{
		state: lua.NewState(lua.Options{SkipOpenLibs: true, CallStackSize: depthLimit, RegistryMaxSize: registryLimit}),
		meter: newMeter(ctx), end: cancel,
	}
	box.open()
	box.state.SetContext(box.meter) //nolint:contextcheck // the meter wraps ctx
	if err := box.call(box.state.NewFunctionFromProto(proto), 0); err != nil {
		box.close()
		return nil, err
	}
	return box, nil
}

func (b *sandbox) close() {
	b.state.Close()
	b.end()
}

// open gives the script its libraries.
func (b *sandbox) open() {
	for _, library := range []struct {
		name string
		open lua.LGFunction
	}{
		{lua.BaseLibName, lua.OpenBase}, {lua.TabLibName, lua.OpenTable}, {lua.StringLibName, lua.OpenString}, {lua.MathLibName, lua.OpenMath},
	} {
		b.state.Push(b.state.NewFunction(library.open))
		b.state.Push(lua.LString(library.name))
		b.state.Call(1, 0)
	}
	// What reads files, writes to our output, runs text as code past the limits, or reaches into the interpreter.
	for _, name := range []string{
		"dofile", "load", "loadfile", "loadstring", "require", "module", "print", "collectgarbage", "newproxy", "getfenv", "setfenv", "_printregs",
	} {
		b.state.SetGlobal(name, lua.LNil)
	}
	b.limitStrings()
	b.limitSorting()
}

// limitSorting has the meter asked at every comparison of a sort.
func (b *sandbox) limitSorting() {
	library := b.state.GetGlobal(lua.TabLibName).(*lua.LTable)
	sort := library.RawGetString("sort").(*lua.LFunction)
	less := b.state.NewFunction(func(state *lua.LState) int {
		select {
		case <-b.meter.Done():
			state.RaiseError("%s", b.meter.Err())
		default:
		}
		state.Push(lua.LBool(state.LessThan(state.Get(1), state.Get(2))))
		return 1
	})
	library.RawSetString("sort", b.state.NewFunction(func(state *lua.LState) int {
		if state.GetTop() == 1 {
			state.Push(less)
		}
		return call(state, sort)
	}))
}

// evaluate calls the script's function of that name with the global set, and returns the table that it answers with.
func (b *sandbox) evaluate(global string, value lua.LValue) (*lua.LTable, error) {
	b.state.SetGlobal(global, value)
	function, ok := b.state.GetGlobal("evaluate").(*lua.LFunction)
	if !ok {
		return nil, fmt.Errorf("%w: it has no function evaluate", errUnclear)
	}
	if err := b.call(function, 1); err != nil {
		return nil, err
	}
	answer := b.state.Get(-1)
	b.state.Pop(1)
	table, ok := answer.(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("%w: evaluate returns a %s, not a table", errUnclear, answer.Type())
	}
	return table, nil
}

func (b *sandbox) call(function *lua.LFunction, results int) error {
	err := b.state.CallByParam(lua.P{Fn: function, NRet: results, Protect: true})
	if err == nil {
		return nil
	}
	if limit := b.meter.Err(); limit != nil {
		return limit
	}
	var raised *lua.ApiError
	if !errors.As(err, &raised) {
		return fmt.Errorf("%w: %w", errUnclear, err)
	}
	// The address of a table would be another one each time.
	said := "it raised a value that is no text"
	if raised.Object != nil && (raised.Object.Type() == lua.LTString || raised.Object.Type() == lua.LTNumber) {
		said = strings.TrimPrefix(raised.Object.String(), "script:")
	}
	return fmt.Errorf("%w: %s", errUnclear, said)
}

// value makes of a part of an object what scripts see: null is left out.
func (b *sandbox) value(part any) lua.LValue {
	switch part := part.(type) {
	case map[string]any:
		table := b.state.NewTable()
		for key, entry := range part {
			table.RawSetString(key, b.value(entry))
		}
		return table
	case []any:
		table := b.state.NewTable()
		for _, entry := range part {
			table.Append(b.value(entry))
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
