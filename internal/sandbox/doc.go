// Package sandbox runs functions on untrusted input in child processes, which it kills at limits of time and memory.
//
// internal/source and internal/render expand templates and apply patches in it, and internal/check runs scripts. Go
// cannot stop a template from outside, and one call of a template function can take any time or memory, or overflow the
// stack, which ends the whole process (docs/adr/0014). The hub and the agent of a SveltosCluster have one Pool each. A
// Pool starts children with a command that calls Serve, and reuses them. On Linux, children cannot open files or
// sockets, or start programs.
//
// Steps of Pool.Call (pool.go):
//
//   - It waits while too many calls with the same key run. If one of them, or an earlier one, has exceeded a limit a
//     short time ago, it returns the error of that call.
//   - It waits until the scope may run another call, and reserves memory for the input.
//   - It takes an idle child of the scope, or starts one (children.go, child.go).
//   - It sends the input, runs the callbacks that the child requests, and receives the output (child.exchange). In the
//     child, Serve runs the function (serve.go).
//   - If the call succeeds, it makes the child idle. Otherwise it kills the child, and stores the failure for the key.
//
// Terms:
//
//   - Call: one execution of a function in a child. Input and output are JSON.
//   - Callback: a request of a running function to the caller of Pool.Call, for example for an object of a member.
//   - Scope: the users whose calls share children, for example the tenants of a namespace.
//   - Key: the identity of the input of a call, without the data of a member.
//   - Limit: the maximum of time (Call.Limit), memory, stack or size of the output. A call that exceeds one returns a
//     LimitError. For some time after that, the Pool returns the same error to calls with the same key.
//
// Other files: size.go estimates the size of JSON; memory.go reads the memory of a child; limit_*.go and confine_*.go
// limit the memory and the system calls of a child, from inside.
//
// Start reading at Pool.Call in pool.go.
package sandbox
