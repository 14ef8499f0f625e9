// Package executionnamespaces manages the execution namespaces of Clusters, and the removal of deleted Clusters.
//
// The hub runs Controller for the Clusters of its shard. For a Cluster that is not being deleted, its steps are:
//
//  1. Remove the annotations of an earlier removal: the Cluster was restored from a backup.
//  2. Validate the Cluster and claim its ID. Only one Cluster can have an ID.
//  3. Set the finalizer and the ID of this hub.
//  4. Create or repair the execution namespace and, in pull mode, the agent's RBAC.
//  5. Complete the registration when the Cluster is ready and its agent is alive. If that takes longer than
//     RegistrationTimeout, and the agent is silent and the Cluster has no content, delete the Cluster.
//
// For a Cluster that is being deleted, the steps are:
//
//  1. Abandon the deployments if the member is unreachable.
//  2. Withdraw the summaries, the Works and other deployments of this hub from the member.
//  3. Remove the registration from the member: in push mode the hub deletes its account, in pull mode the agent removes
//     itself.
//  4. Delete the objects of the Cluster on the hub and its ClusterConfiguration, and remove the finalizer.
//
// Words:
//
//   - deployment: a bundle or a Work on a member. It stays there until it is withdrawn.
//   - content: the Works and ConfigurationGroups in an execution namespace.
//   - refused: a field of the Cluster is not supported or not allowed, see fleet.Member.Refused. Nothing is created.
//   - alive: a push member answers a request; the agent of a pull member renews its Lease. Silent: not alive.
//   - pending work: text that describes what a removal waits for, for example two Works to be withdrawn.
//   - stalled: the pending work has not changed for stallTimeout while the member is not alive, or for maxStallTimeout.
//   - abandon: leave the deployments on the member, and record that in an annotation of the Cluster.
//   - hub account: the ServiceAccount on a push member that this hub uses.
//   - order: the annotation kube.AnnotationAgentRequest, which requests the agent to remove itself. The agent answers
//     on its Lease.
//
// Invariants:
//
//   - A removal ends: each wait for a member or for another controller has a timeout.
//   - Each step can be interrupted and repeated. All progress is in API objects; only the timeouts are in memory.
//   - The status of a Cluster is not enough to abandon it, since it may be lost or come from a backup.
//
// A second controller sets the execution finalizer on Works (works.go). Start reading at Controller.Reconcile in
// controller.go; the steps are in ensure.go, removal.go, remaining.go and registration.go.
package executionnamespaces
