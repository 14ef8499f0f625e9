package check

import (
	"reflect"
	"regexp"
	"strings"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/ast"
)

const (
	// textLimit is how many bytes of text a script may make.
	textLimit = 64 << 20
	// concatenate is the name of the function that takes the place of the operator "..": no script can spell it.
	concatenate = "\x00concatenate"
)

// oddFormat finds widths and precisions that Lua itself refuses, and the notation of Go.
var oddFormat = regexp.MustCompile(`%[^a-zA-Z%]*(\d{3}|[*\[])`)

// limitConcatenation makes each ".." of a script a call of our function: a text can be doubled thirty times in no time.
func limitConcatenation(chunk []ast.Stmt) { rewrite(reflect.ValueOf(chunk)) }

// rewrite walks over everything that a part of a script consists of.
func rewrite(part reflect.Value) {
	switch part.Kind() {
	case reflect.Interface:
		if part.IsNil() {
			return
		}
		rewrite(part.Elem())
		if operator, ok := part.Interface().(*ast.StringConcatOpExpr); ok {
			name := &ast.IdentExpr{Value: concatenate}
			call := &ast.FuncCallExpr{Func: name, Args: []ast.Expr{operator.Lhs, operator.Rhs}, AdjustRet: true}
			name.SetLine(operator.Line())
			call.SetLine(operator.Line())
			call.SetLastLine(operator.LastLine())
			part.Set(reflect.ValueOf(call))
		}
	case reflect.Pointer:
		if !part.IsNil() {
			rewrite(part.Elem())
		}
	case reflect.Slice:
		for i := range part.Len() {
			rewrite(part.Index(i))
		}
	case reflect.Struct:
		for i := range part.NumField() {
			if field := part.Field(i); field.CanSet() {
				rewrite(field)
			}
		}
	default:
	}
}

// limitStrings puts the functions that make text, or match patterns, under the limits.
func (b *sandbox) limitStrings() {
	left := textLimit
	spend := func(state *lua.LState, bytes int) {
		if left -= bytes; left < 0 || bytes < 0 {
			left = 0
			state.RaiseError("the script makes more than %d bytes of text", textLimit)
		}
	}
	spendArguments := func(state *lua.LState) {
		for i := range state.GetTop() {
			if argument, ok := state.Get(i + 1).(lua.LString); ok {
				spend(state, len(argument))
			}
		}
	}
	library := b.state.GetGlobal(lua.StringLibName).(*lua.LTable)
	library.RawSetString("dump", lua.LNil)
	for name, before := range map[string]func(*lua.LState){
		"lower": spendArguments, "upper": spendArguments, "reverse": spendArguments, "char": spendArguments,
		"format": func(state *lua.LState) {
			if oddFormat.MatchString(state.CheckString(1)) {
				state.RaiseError("invalid format (width or precision)")
			}
			spend(state, 100*len(state.CheckString(1)))
			spendArguments(state)
		},
		"rep": func(state *lua.LState) {
			if times := state.CheckInt(2); times > 0 {
				spend(state, product(len(state.CheckString(1)), times))
			}
		},
		"find": func(state *lua.LState) {
			if !state.ToBool(4) {
				limitMatch(state)
			}
		},
		"match":  func(state *lua.LState) { limitMatch(state) },
		"gmatch": func(state *lua.LState) { limitMatches(state) },
		"gsub": func(state *lua.LState) {
			// A table or a function could make every match as long as it likes.
			subject, replacement := len(state.CheckString(1)), len(state.CheckString(3))
			limitReplacing(state)
			spend(state, subject+product(replacement, 2*subject+1))
		},
	} {
		function := library.RawGetString(name).(*lua.LFunction)
		library.RawSetString(name, b.state.NewFunction(func(state *lua.LState) int {
			before(state)
			return call(state, function)
		}))
	}
	b.state.SetGlobal(concatenate, b.state.NewFunction(func(state *lua.LState) int {
		return join(state, spend, "", []lua.LValue{state.Get(1), state.Get(2)})
	}))
	b.state.GetGlobal(lua.TabLibName).(*lua.LTable).RawSetString("concat", b.state.NewFunction(func(state *lua.LState) int {
		table := state.CheckTable(1)
		var parts []lua.LValue
		for i := max(state.OptInt(3, 1), 1); i <= min(state.OptInt(4, table.Len()), table.Len()); i++ {
			parts = append(parts, table.RawGetInt(i))
		}
		return join(state, spend, state.OptString(2, ""), parts)
	}))
}

// call calls function with the arguments that the running one has, and returns what it returns.
func call(state *lua.LState, function *lua.LFunction) int {
	arguments := state.GetTop()
	state.Insert(function, 1)
	state.Call(arguments, lua.MultRet)
	return state.GetTop()
}

// join makes one text of parts.
func join(state *lua.LState, spend func(*lua.LState, int), separator string, parts []lua.LValue) int {
	texts := make([]string, len(parts))
	for i, part := range parts {
		if !lua.LVCanConvToString(part) {
			state.RaiseError("attempt to concatenate a %s value", part.Type())
		}
		texts[i] = part.String()
		spend(state, len(texts[i])+len(separator))
	}
	state.Push(lua.LString(strings.Join(texts, separator)))
	return 1
}

// product multiplies; what is more than a script may have comes back as that and one more.
func product(a, b int) int {
	if a != 0 && b > textLimit/a {
		return textLimit + 1
	}
	return a * b
}
