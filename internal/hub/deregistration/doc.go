// Package deregistration deregisters SveltosClusters.
//
// The hub runs Controller for the SveltosClusters of its shard that are being deleted. The steps are:
//
//  1. Check whether the member is reachable, and whether the deregistration must be forced.
//  2. Delete the summaries, and wait until they are withdrawn from the member.
//  3. Withdraw this hub's other bundles: they have no summary (package unclaimed).
//  4. Remove the registration from the member: in push mode the hub deletes its identity, in pull mode the agent
//     removes itself.
//  5. Delete the objects of the registration on the hub.
//  6. Delete the ClusterConfiguration, and remove the finalizer.
//
// A deregistration is forced by the user, when the grace period of an unreachable member has expired, or when a
// namespace with the identity of the member is being deleted. A forced deregistration has a deadline. After the
// deadline, the hub adds the option abandon to the cluster: the remaining summaries are deleted without a withdrawal,
// and their objects stay on the member. An annotation of the cluster and events list the objects that stay.
//
// Terms:
//
//   - identity: the ServiceAccount of the hub on a push member, with its RBAC objects (join.DeleteMemberObjects).
//   - order, answer: the annotation by which the hub orders an agent to remove itself, and status.agentRemovedAt.
//   - left behind: an object or a bundle that stays on the member or on the hub.
//
// Invariants:
//
//   - Each step can be interrupted and repeated. All progress is in API objects.
//   - A deregistration that is not forced waits for the member without a limit; failureMessage has the pending work.
//   - The status of a cluster alone never proves that the member is unreachable, since it may come from a backup.
//   - While ClusterLocks are held for a cluster, package registration creates nothing for it.
//
// Start reading at Controller.Reconcile in controller.go; the steps are in force.go and steps.go, and Reachability is
// in reachability.go.
package deregistration
