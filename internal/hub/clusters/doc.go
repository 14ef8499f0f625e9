// Package clusters reconciles Clusters: it observes each member and writes its status and its taints, and it completes
// its spec.
//
// A reconcile has four steps. completeSpec writes defaults to the spec. observe sends requests to a push member, or
// evaluates the heartbeats of the agent of a pull member. patchStatus writes the status and records events.
// updateTaints writes the taints for a member that is not ready or not reachable.
//
// Push and pull members have separate queues. A push member is observed every 10 s with an observer, which watches the
// nodes and pods of the member until the Cluster is deleted. A pull member is reconciled when its Lease or its status
// changes, and when the time limit for its heartbeat expires. Its agent writes the status; the hub writes only the
// status of a silent agent. Failures of a member are written to the status; errors are failures of the hub.
//
// Words:
//
//   - observer: reads the health, version, APIs, nodes and pod requests of one push member, see package clusterstatus.
//   - silent: an agent without a heartbeat within its time limit, see package heartbeats.
//   - refused: a field of the Cluster is not supported or not allowed, see fleet.Member.Refused. It is not observed.
//
// Start reading at Controller.Reconcile in controller.go, then steps.go.
package clusters
