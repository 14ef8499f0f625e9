// Package script runs Lua scripts of users within limits of time, memory and steps.
//
// Two packages call it, in child processes (internal/sandbox) where only the script uses memory. internal/check runs
// the checks of clusters with New, on the hub and in the agent. internal/source runs scripts that return the content of
// a profile with NewForContent, on the hub.
//
// The steps of a caller:
//
//  1. New or NewForContent parses the script, adds the libraries, sets the limits and runs the script, which defines
//     the function evaluate (script.go).
//  2. Script.ToLua converts the input of evaluate.
//  3. Script.Evaluate calls evaluate and returns its result, a table.
//  4. Script.Close ends the interpreter.
//
// The libraries are base, table, string and math of Lua 5.1, without files, output and code loading. Content has more
// functions (content.go). The interpreter is github.com/yuin/gopher-lua. It calls Go functions without limits, so three
// kinds of limits are needed:
//
//   - scriptLimiter limits instructions, memory and processor time. The interpreter calls it before each instruction,
//     but not inside a Go function (limiter.go).
//   - accountText limits the bytes of text that functions and the operator ".." create (strings.go).
//   - The check functions refuse a pattern match that could take too long, before it starts (patterns.go).
//
// Words: a step is one instruction of the interpreter. Text is a Lua string. A subject is the text that a pattern is
// matched with. An item of a pattern matches one byte, for example "%d" or "[a-z]".
//
// Start reading at newScript in script.go.
package script
