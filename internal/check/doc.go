// Package check runs a cluster's readiness and liveness checks, which users write in Lua.
//
// The controller of SveltosClusters calls Checker.EvaluateCluster in push mode, and the agent calls it in pull mode.
// Checker.Run handles one list of checks: it lists the objects that a check selects (select.go), filters them by the
// script of each selector, and passes them to the script of the condition (check.go, scripts.go).
//
// Scripts come from users: internal/script limits their time, their memory and their functions. It measures the heap of
// the whole process, so scripts run in child processes (internal/sandbox), where only they use memory.
//
// A check fails if its condition does not pass, and also if a script is invalid or exceeds a limit. Every other problem
// is an error: a failed request, an invalid selector, objects that are too large, or a child that cannot be started.
// Messages are one line of at most 1024 bytes, because they are written to a status.
//
// Start reading at Checker.Run.
package check
