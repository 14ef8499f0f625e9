// Package clusters reconciles SveltosClusters: it observes each member and writes its status, its labels and its active
// window.
//
// A reconcile has four steps. applyWindow pauses or unpauses the cluster by its active window. contact observes the
// member: it sends requests to a push member, and evaluates the heartbeats of the agent of a pull member. patchLabels
// writes the labels of a push member. patchStatus writes the status and records events.
//
// Push and pull members have separate queues, with one reconciler for both. A push member is contacted every minute, or
// every 10 s until its readiness checks pass. A pull member is reconciled when its Lease or its status changes, and
// when its agent could become silent. Failures of a member are written to the status; errors are failures of the hub.
//
// The hub starts one Controller. Others read its result from the status of SveltosClusters.
package clusters
