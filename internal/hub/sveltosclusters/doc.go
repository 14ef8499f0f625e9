// Package sveltosclusters reconciles SveltosClusters: it observes each member and writes its status, its labels and its
// active window.
//
// A reconcile has four steps. applyWindow pauses or unpauses the cluster by spec.activeWindow. contact observes the
// member: it sends requests to a push member, and evaluates the heartbeats of the agent of a pull member. patchLabels
// writes the labels of a push member. patchStatus writes the status and records events.
//
// Push and pull members have separate queues, with one reconciler for both. A push member is contacted every minute, or
// every 10 s until its readiness checks pass. A pull member is reconciled when its Lease or its status changes, and
// when the time limit for its heartbeat expires. Failures of a member are written to the status; errors are failures of
// the hub.
//
// Words:
//
//   - facts: the version and the served APIs of a member.
//   - checks: the readiness and liveness checks in the spec of a SveltosCluster, which are Lua scripts.
//   - active window: two cron expressions. The first one unpauses the cluster, the second one pauses it.
//   - refused: a field of the SveltosCluster is not supported or not allowed, see fleet.Member.Refused.
//   - Down: the connection status after several failed contacts or checks in a row, or while an agent is silent.
//   - slot: the right to use a worker, see package slots.
//   - problem: an error that is only written to failureMessage and an event, for example of the active window.
//
// Start reading at Controller.Reconcile in controller.go, then steps.go. status.go computes the status, and window.go
// the active window. Other controllers read the result from the status of SveltosClusters.
package sveltosclusters
