// Package sandbox runs functions on untrusted input in child processes, which it kills at limits of time and memory.
//
// internal/source and internal/render expand templates and apply patches in it, and internal/check runs scripts. Go
// cannot stop a template from outside, and one call of a template function can take any time or memory, or overflow the
// stack, which ends the whole process (docs/adr/0014). A Pool starts children with a command that calls Serve, and
// reuses them. On Linux, children cannot open files or sockets, or start programs.
//
// Terms:
//
//   - Call: one execution of a function in a child. Input and output are JSON.
//   - Callback: a function in a child requests data from the caller while it runs, for example an object of a member.
//   - Scope: the users whose calls share children. Callers keep results for other scopes apart.
//   - Limit: the maximum of time (Call.Limit), memory, stack or size of the result. A LimitError is remembered for a
//     growing time.
//
// Start reading at Pool.Call in pool.go.
package sandbox
