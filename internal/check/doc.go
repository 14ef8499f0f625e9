// Package check runs a cluster's readiness and liveness checks, which users write in Lua.
//
// The controller of SveltosClusters calls EvaluateCluster in push mode, and the agent calls it in pull mode. Run
// handles one list of checks: it lists the objects that a check selects (select.go), filters them by the script of each
// selector, and passes them to the script of the condition (check.go).
//
// Scripts come from users: internal/script limits their time, their memory and their functions.
//
// A check fails if its condition does not pass, and also if a script is invalid or exceeds a limit. Only failed
// requests to the cluster are errors. Messages are one line of at most 1024 bytes, because they are written to a
// status.
//
// Start reading at Run.
package check
