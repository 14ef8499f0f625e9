package script

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	lua "github.com/yuin/gopher-lua"
)

// maxDepth limits the nesting of the tables for json.encode and of the text for json.decode.
const maxDepth = 100

// NewForContent is New with more functions: getResource, getLabel, getAnnotation, base64Encode and base64Decode. The
// modules json and strings are global variables, and require returns them. print has no effect. The results of a script
// are repeatable, so there are no random numbers.
func NewForContent(ctx context.Context, script string) (*Script, error) {
	return newScript(ctx, script, func(s *Script) {
		s.addLibraries()
		s.addContentLibraries()
		for _, name := range []string{"random", "randomseed"} {
			s.state.SetField(s.state.GetGlobal(lua.MathLibName), name, lua.LNil)
		}
	})
}

func (s *Script) addContentLibraries() {
	modules := map[string]lua.LValue{
		"json":    s.newModule(map[string]lua.LGFunction{"encode": s.encodeJSON, "decode": s.decodeJSON}),
		"strings": s.newModule(s.stringFunctions()),
	}
	for name, module := range modules {
		s.state.SetGlobal(name, module)
	}
	for name, function := range map[string]lua.LGFunction{
		"getResource":   getResource,
		"getLabel":      metadataGetter("labels"),
		"getAnnotation": metadataGetter("annotations"),
		"base64Encode": func(state *lua.LState) int {
			text := state.CheckString(1)
			return s.pushText(state, base64.StdEncoding.EncodedLen(len(text)), func() string { return base64.StdEncoding.EncodeToString([]byte(text)) })
		},
		"base64Decode": s.decodeBase64,
		"print":        func(*lua.LState) int { return 0 },
		"require": func(state *lua.LState) int {
			module, ok := modules[state.CheckString(1)]
			if !ok {
				state.RaiseError("module %q does not exist; there are json and strings", state.CheckString(1))
			}
			state.Push(module)
			return 1
		},
	} {
		s.state.SetGlobal(name, s.state.NewFunction(function))
	}
}

func (s *Script) newModule(functions map[string]lua.LGFunction) *lua.LTable {
	module := s.state.NewTable()
	s.state.SetFuncs(module, functions)
	return module
}

// pushText returns the result of create, which has at most maxBytes, to the script.
func (s *Script) pushText(state *lua.LState, maxBytes int, create func() string) int {
	s.accountText(state, maxBytes)
	state.Push(lua.LString(create()))
	return 1
}

// getResource(resources, identifier) returns a resource of the script's input, nil if it does not exist.
func getResource(state *lua.LState) int {
	state.Push(state.CheckTable(1).RawGetString(state.CheckString(2)))
	return 1
}

// metadataGetter returns the function (resource, key) that returns metadata.<field>[key] of a resource, or nil.
func metadataGetter(field string) lua.LGFunction {
	return func(state *lua.LState) int {
		value := lua.LValue(state.CheckTable(1))
		for _, name := range []string{"metadata", field, state.CheckString(2)} {
			table, ok := value.(*lua.LTable)
			if !ok {
				value = lua.LNil
				break
			}
			value = table.RawGetString(name)
		}
		state.Push(value)
		return 1
	}
}

// decodeBase64 returns the decoded text, or nil and a message if the text is not base64.
func (s *Script) decodeBase64(state *lua.LState) int {
	text := state.CheckString(1)
	s.accountText(state, base64.StdEncoding.DecodedLen(len(text)))
	decoded, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		state.Push(lua.LNil)
		state.Push(lua.LString("the text is not base64"))
		return 2
	}
	state.Push(lua.LString(decoded))
	return 1
}

// stringFunctions returns the functions of the module strings. Each does the same as the function of Go's package
// strings with its name.
func (s *Script) stringFunctions() map[string]lua.LGFunction {
	functions := map[string]lua.LGFunction{
		"Compare": func(state *lua.LState) int {
			state.Push(lua.LNumber(cmp.Compare(state.CheckString(1), state.CheckString(2))))
			return 1
		},
		"Join": func(state *lua.LState) int {
			var parts []lua.LValue
			table := state.CheckTable(1)
			for i := range table.Len() {
				parts = append(parts, table.RawGetInt(i+1))
			}
			return pushConcatenation(state, s.accountText, state.CheckString(2), parts)
		},
		"Replace": func(state *lua.LState) int {
			text, old, replacement, n := state.CheckString(1), state.CheckString(2), state.CheckString(3), state.OptInt(4, -1)
			matches := strings.Count(text, old)
			return s.pushText(state, len(text)+boundedProduct(len(replacement), matches), func() string { return strings.Replace(text, old, replacement, n) })
		},
		"Split": s.splitText,
	}
	for name, function := range map[string]func(a, b string) bool{"Contains": strings.Contains, "HasPrefix": strings.HasPrefix, "HasSuffix": strings.HasSuffix} {
		functions[name] = func(state *lua.LState) int {
			state.Push(lua.LBool(function(state.CheckString(1), state.CheckString(2))))
			return 1
		}
	}
	for name, function := range map[string]func(string) string{"ToLower": strings.ToLower, "ToUpper": strings.ToUpper, "TrimSpace": strings.TrimSpace} {
		functions[name] = func(state *lua.LState) int {
			text := state.CheckString(1)
			return s.pushText(state, boundedProduct(len(text), 3), func() string { return function(text) }) // a letter can become longer
		}
	}
	for name, function := range map[string]func(a, b string) string{"Trim": strings.Trim, "TrimPrefix": strings.TrimPrefix, "TrimSuffix": strings.TrimSuffix} {
		functions[name] = func(state *lua.LState) int {
			text, other := state.CheckString(1), state.CheckString(2)
			return s.pushText(state, len(text), func() string { return function(text, other) })
		}
	}
	return functions
}

// splitText returns a list of the parts of a text.
func (s *Script) splitText(state *lua.LState) int {
	text, separator := state.CheckString(1), state.CheckString(2)
	s.accountText(state, boundedProduct(strings.Count(text, separator)+1, matchSize)+len(text))
	parts := state.NewTable()
	for part := range strings.SplitSeq(text, separator) {
		parts.Append(lua.LString(part))
	}
	state.Push(parts)
	return 1
}

// decodeJSON returns the decoded value, or nil and a message if the text is not JSON.
func (s *Script) decodeJSON(state *lua.LState) int {
	text := state.CheckString(1)
	s.accountText(state, boundedProduct(len(text), captureSize)) // "[0,0,0]" becomes a list of values
	var value any
	decoder := json.NewDecoder(strings.NewReader(text))
	if strings.Count(text, "[")+strings.Count(text, "{") > maxDepth && depth(text) > maxDepth {
		state.RaiseError("the JSON is nested deeper than %d", maxDepth)
	}
	if err := decoder.Decode(&value); err != nil {
		state.Push(lua.LNil)
		state.Push(lua.LString("the text is not JSON"))
		return 2
	}
	state.Push(s.ToLua(value))
	return 1
}

// depth returns the nesting of a JSON text. Brackets in strings can make the result too high.
func depth(text string) int {
	deepest, open := 0, 0
	for i := range len(text) {
		switch text[i] {
		case '[', '{':
			open++
			deepest = max(deepest, open)
		case ']', '}':
			open--
		}
	}
	return deepest
}

func (s *Script) encodeJSON(state *lua.LState) int {
	var out strings.Builder
	write := func(text string) {
		s.accountText(state, len(text)+1)
		out.WriteString(text)
	}
	if err := writeJSON(state.CheckAny(1), write, 0); err != nil {
		state.RaiseError("%s", err)
	}
	state.Push(lua.LString(out.String()))
	return 1
}

// writeJSON writes a value of a script as JSON. A table with the keys 1, 2, 3, ... only is a list.
func writeJSON(value lua.LValue, write func(string), depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("tables are nested deeper than %d", maxDepth)
	}
	switch value := value.(type) {
	case *lua.LNilType:
		write("null")
	case lua.LBool:
		write(strconv.FormatBool(bool(value)))
	case lua.LString, lua.LNumber:
		var plain any = value.String()
		if number, ok := value.(lua.LNumber); ok {
			plain = float64(number)
		}
		raw, err := json.Marshal(plain)
		if err != nil {
			return fmt.Errorf("encode %s: %w", value, err)
		}
		write(string(raw))
	case *lua.LTable:
		return writeTable(value, write, depth)
	default:
		return fmt.Errorf("a %s cannot be encoded as JSON", value.Type())
	}
	return nil
}

func writeTable(table *lua.LTable, write func(string), depth int) error {
	fields := map[string]lua.LValue{}
	table.ForEach(func(key, value lua.LValue) { fields[key.String()] = value })
	if isList(table, len(fields)) {
		for i := range len(fields) {
			write([]string{"[", ","}[min(i, 1)])
			if err := writeJSON(table.RawGetInt(i+1), write, depth+1); err != nil {
				return err
			}
		}
		write("]")
		return nil
	}
	write("{")
	for i, key := range slices.Sorted(maps.Keys(fields)) { // the same table has the same text
		if i > 0 {
			write(",")
		}
		if err := writeJSON(lua.LString(key), write, depth); err != nil {
			return err
		}
		write(":")
		if err := writeJSON(fields[key], write, depth+1); err != nil {
			return err
		}
	}
	write("}")
	return nil
}

// isList returns whether the keys of a table with n entries are 1 to n.
func isList(table *lua.LTable, n int) bool {
	for i := range n {
		if table.RawGetInt(i+1) == lua.LNil {
			return false
		}
	}
	return n > 0
}
