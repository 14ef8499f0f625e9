// Package check runs a cluster's readiness and liveness checks, which users write in Lua.
//
// The controller of SveltosClusters calls Checker.EvaluateCluster in push mode, and the agent calls it in pull mode.
// Checker.Run handles one list of checks: it lists the objects that a check selects (select.go), filters them by the
// script of each selector, and passes them to the script of the condition (check.go, scripts.go).
//
// Scripts come from users: internal/script limits their time, their memory and their functions, and they run in
// child processes (internal/sandbox), so that the memory of a rollout does not count as theirs.
//
// A check fails if its condition does not pass, and also if a script is invalid or exceeds a limit. Only failed
// requests to the cluster are errors. Messages are one line of at most 1024 bytes, because they are written to a
// status.
//
// Start reading at Checker.Run.
package check
