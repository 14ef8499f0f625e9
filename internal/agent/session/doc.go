// Package session has the parts that the agents of both cluster kinds share: deliveries, connection, health and
// removal.
//
// The agents of SveltosClusters (internal/agent) and of Clusters (internal/agent/karmada) import it. It has no Run of
// its own: each agent wires these parts, in the order of a start:
//
//  1. Probes serves health and metrics (probes.go, metrics.go). A Watchdog lets the liveness probe fail if the loop of
//     the heartbeats is stuck.
//  2. BackoffLoop runs each long-lived task and restarts it with growing delays (backoffloop.go).
//  3. AuthErrorLog logs a rejected credential with the command that repairs it, and drops the log lines of the
//     individual rejected requests (autherrorlog.go).
//  4. ClusterWatcher watches the cluster object of this agent on the hub (clusterwatcher.go). The agent closes its Gate
//     while the cluster is paused (gate.go).
//  5. Worker handles each delivery: it fetches a bundle, applies it with the engine and reports (worker.go).
//  6. When the cluster is deregistered, OwnerClient makes the agent's objects dependents of one object and deletes that
//     one (ownerclient.go). UninstallState records the removal, so that it continues after a restart
//     (uninstallstate.go).
//
// Words:
//
//   - session: one connection of an agent to its hub, from the claim of its Lease until the connection or the agent
//     ends.
//   - delivery: the hub's request to apply or remove a bundle, see internal/deliver. To wake it is to queue it again.
//   - group: a ConfigurationGroup on the hub. Its spec is the delivery, its status the report.
//   - converge: make the member equal a bundle.
//   - Outdated: a Helm release that the hub must render again. Its bundle is not applied until then.
//   - inventory: the record on the member of the applied objects of one bundle; see internal/inventory.
//   - foreign object: an object in the agent's namespace that neither the agent nor Kubernetes created there.
//   - rejected credential: the hub responds, but with Unauthorized or Forbidden.
//   - state object: the Secret or ConfigMap on the member that has the UninstallState in an annotation.
//   - prepared uninstallation: the state is written, and the agent's objects have their owner reference.
//   - answer: the agent's confirmation, to the hub, that it removes itself.
//
// Start reading at Worker.Handle.
package session
