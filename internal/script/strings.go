package script

import (
	"reflect"
	"regexp"
	"strings"

	lua "github.com/yuin/gopher-lua"
	"github.com/yuin/gopher-lua/ast"
)

const (
	// maxText is the maximum number of bytes of text that a script may create.
	maxText = 64 << 20
	// concatenateName is the name of the function that replaces the operator "..". Scripts cannot use such a name.
	concatenateName = "\x00concatenate"
)

// invalidFormat matches a width or precision of three digits, which Lua rejects, and "*" and "[", which only Go knows.
var invalidFormat = regexp.MustCompile(`%[^a-zA-Z%]*(\d{3}|[*\[])`)

// limitConcatenation replaces each ".." of a script by a call of a function that accounts for the text. Otherwise a
// script could double a text thirty times in a moment.
func limitConcatenation(chunk []ast.Stmt) { replaceConcatenation(reflect.ValueOf(chunk)) }

// replaceConcatenation visits all parts of a script recursively.
func replaceConcatenation(part reflect.Value) {
	switch part.Kind() {
	case reflect.Interface:
		if part.IsNil() {
			return
		}
		replaceConcatenation(part.Elem())
		if operator, ok := part.Interface().(*ast.StringConcatOpExpr); ok {
			name := &ast.IdentExpr{Value: concatenateName}
			call := &ast.FuncCallExpr{Func: name, Args: []ast.Expr{operator.Lhs, operator.Rhs}, AdjustRet: true}
			name.SetLine(operator.Line())
			call.SetLine(operator.Line())
			call.SetLastLine(operator.LastLine())
			part.Set(reflect.ValueOf(call))
		}
	case reflect.Pointer:
		if !part.IsNil() {
			replaceConcatenation(part.Elem())
		}
	case reflect.Slice:
		for i := range part.Len() {
			replaceConcatenation(part.Index(i))
		}
	case reflect.Struct:
		for i := range part.NumField() {
			if field := part.Field(i); field.CanSet() {
				replaceConcatenation(field)
			}
		}
	default:
	}
}

// limitStrings replaces the functions that create text or match patterns by functions that check the limits first.
func (s *Script) limitStrings() {
	account := s.accountText
	accountArguments := func(state *lua.LState) {
		for i := range state.GetTop() {
			if argument, ok := state.Get(i + 1).(lua.LString); ok {
				account(state, len(argument))
			}
		}
	}
	library := s.state.GetGlobal(lua.StringLibName).(*lua.LTable)
	library.RawSetString("dump", lua.LNil)
	for name, checkLimits := range map[string]func(*lua.LState){
		"lower": accountArguments, "upper": accountArguments, "reverse": accountArguments, "char": accountArguments,
		"format": func(state *lua.LState) {
			if invalidFormat.MatchString(state.CheckString(1)) {
				state.RaiseError("invalid format (width or precision)")
			}
			account(state, 100*len(state.CheckString(1))) // a width has at most two digits
			accountArguments(state)
		},
		"rep": func(state *lua.LState) {
			if times := state.CheckInt(2); times > 0 {
				account(state, boundedProduct(len(state.CheckString(1)), times))
			}
		},
		"find": func(state *lua.LState) {
			if !state.ToBool(4) {
				checkMatch(state)
			}
		},
		"match":  func(state *lua.LState) { checkMatch(state) },
		"gmatch": func(state *lua.LState) { checkMatches(state) },
		"gsub": func(state *lua.LState) {
			subject, replacement := len(state.CheckString(1)), len(state.CheckString(3))
			checkReplace(state)
			account(state, subject+boundedProduct(replacement, 2*subject+1))
		},
	} {
		function := library.RawGetString(name).(*lua.LFunction)
		library.RawSetString(name, s.state.NewFunction(func(state *lua.LState) int {
			if name == "gsub" && (state.Get(3).Type() == lua.LTTable || state.Get(3).Type() == lua.LTFunction) {
				return s.replaceMatches(state)
			}
			checkLimits(state)
			return forwardCall(state, function)
		}))
	}
	s.state.SetGlobal(concatenateName, s.state.NewFunction(func(state *lua.LState) int {
		return pushConcatenation(state, account, "", []lua.LValue{state.Get(1), state.Get(2)})
	}))
	s.state.GetGlobal(lua.TabLibName).(*lua.LTable).RawSetString("concat", s.state.NewFunction(func(state *lua.LState) int {
		table := state.CheckTable(1)
		var parts []lua.LValue
		for i := max(state.OptInt(3, 1), 1); i <= min(state.OptInt(4, table.Len()), table.Len()); i++ {
			parts = append(parts, table.RawGetInt(i))
		}
		return pushConcatenation(state, account, state.OptString(2, ""), parts)
	}))
}

// accountText subtracts bytes from remainingText. It raises an error if the script creates too much text.
func (s *Script) accountText(state *lua.LState, bytes int) {
	if s.remainingText -= bytes; s.remainingText < 0 || bytes < 0 {
		s.remainingText = 0
		state.RaiseError("the script makes more than %d bytes of text", maxText)
	}
}

// forwardCall calls function with the arguments of the running function, and returns its results to the script.
func forwardCall(state *lua.LState, function *lua.LFunction) int {
	arguments := state.GetTop()
	state.Insert(function, 1)
	state.Call(arguments, lua.MultRet)
	return state.GetTop()
}

// pushConcatenation returns the parts, with the separator between them, as one text to the script.
func pushConcatenation(state *lua.LState, account func(*lua.LState, int), separator string, parts []lua.LValue) int {
	texts := make([]string, len(parts))
	for i, part := range parts {
		if !lua.LVCanConvToString(part) {
			state.RaiseError("attempt to concatenate a %s value", part.Type())
		}
		texts[i] = part.String()
		account(state, len(texts[i])+len(separator))
	}
	state.Push(lua.LString(strings.Join(texts, separator)))
	return 1
}

// boundedProduct returns a*b, or maxText+1 if that is greater.
func boundedProduct(a, b int) int {
	if a != 0 && b > maxText/a {
		return maxText + 1
	}
	return a * b
}
