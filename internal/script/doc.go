// Package script runs Lua scripts of users within limits of time, memory and steps.
//
// internal/check runs the checks of clusters with it, in child processes of the hub and of the agent, and
// internal/source the content that is a script, in child processes of the hub.
//
//   - Scripts have the tables, strings, math and base functions of Lua, without files, output and code loading. Content
//     has more functions (content.go).
//   - scriptLimiter bounds time, instructions and memory (limiter.go). The interpreter calls it before each
//     instruction.
//   - Functions that create text account for its bytes, also the operator ".." (strings.go).
//   - Pattern matching cannot be interrupted, so a match that could take too long is refused before (patterns.go).
//
// Start reading at New in script.go.
package script
