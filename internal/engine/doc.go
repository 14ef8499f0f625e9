// Package engine makes one cluster equal one bundle: order, diff, apply, prune, health.
//
// A run plans first, then reads the metadata of the objects, then decides about each of them. Before it writes
// anything it saves in the inventory what it is about to do, and afterwards the UIDs of what it has applied. Objects
// are applied rank by rank, objects of a Helm release stage by stage. Objects that only the inventory has are pruned
// last, in the reverse order.
//
// Invariants:
//
//   - One run or withdrawal per bundle runs at a time, and one per object. Both are acquired in that order.
//   - The Engine can be killed at any moment: the next run starts from the inventory and is right.
//   - An object is deleted only if it has the ownership annotations of the bundle and, where one is recorded, the
//     recorded UID. Objects of a former Helm revision and ClusterRoles that the aggregation controller created again
//     need no annotations.
//   - A hook is created after the state of its release was saved, so it runs once per revision.
//   - Nothing is locked while a Helm release waits: the run ends, and drift resumes it.
package engine
