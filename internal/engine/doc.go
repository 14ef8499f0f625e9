// Package engine makes one cluster equal one bundle: order, diff, apply, prune, health.
//
// The hub (push members) and the agents (pull members) create one Engine per cluster. They call Converge for each
// bundle, Withdraw for each bundle that is no longer wanted, and Run once, which corrects drift and retries failed runs
// (internal/drift). All state is in the records of internal/inventory, on the cluster itself.
//
// A run (applyRun) has these steps, after the lock of the bundle ID was acquired:
//
//  1. plan converts the objects of the bundle to targets (plan.go, rank.go, exclusions.go).
//  2. lockAndDecide locks the objects, reads their metadata (read.go) and decides about each target: apply it, reject
//     it or do nothing (decide.go; unmanaged.go for Works). A lost record is rebuilt first (rebuild.go).
//  3. saveIntent saves in the record the changes that the run is about to make.
//  4. applyAll applies the objects rank by rank (apply.go; adopt.go takes over the fields of kubectl and helm,
//     retain.go leaves excluded fields alone, definitions.go waits for CustomResourceDefinitions). With Helm releases
//     it applies item by item, and each release in stages: release_plan.go, release_begin.go, release_deploy.go, and in
//     case of a failure release_failure.go and release_rollback.go. A release prunes the objects that its new revision
//     lacks before it waits for readiness.
//  5. uninstallDropped and prune remove the other releases and objects that only the record has (release_uninstall.go,
//     prune.go; after failures partialprune.go), in the reverse order of ranks.
//  6. finish saves the UIDs of the applied objects, and the result. storeFailure decides who repeats a failed run
//     (failedrun.go).
//
// Terms:
//
//   - record, entry: the inventory of one bundle, and one object in it. A release record is Helm's Secret of a
//     revision.
//   - item: a Helm release of a bundle, or the objects of one reference. The origin of an object names its item.
//   - target, decision: an object of the bundle, and the action for it. live is the metadata of the existing object.
//   - ownership: the label and annotations of an object. They name the requestor, which is the bundle ID. The
//     OwnerKey is the key of the requestor and the OwnerScope.
//   - adopted: the object existed before the bundle applied it, so it is orphaned and not deleted.
//   - rank: the position of a kind in the order of application. Stage: the progress of an operation on a release.
//   - takeover: a bundle gets an object of another bundle, whose entry then has the new owner as CompetingOwner.
//   - excluded: a field that is applied only to a new object. Kept: an object that is not pruned.
//   - outdated: a release whose templates read the revision, if the hub rendered it for another revision than the next
//     one. It waits until the hub has rendered it again (release_outdated.go).
//
// Invariants:
//
//   - One run or withdrawal per bundle runs at a time, and one per object. It locks the bundle first, then the objects.
//   - The Engine can be killed at any moment: the next run starts from the record and is right.
//   - An object is deleted only if it has the ownership annotations of the bundle and, where one is recorded, the
//     recorded UID. Objects of a former Helm revision and ClusterRoles that the aggregation controller created again
//     need no annotations.
//   - A hook is created after the state of its release was saved, so it runs once per revision.
//   - Nothing is locked while a Helm release waits: the run ends, and drift resumes it.
//
// Start reading at Engine.Converge and applyRun.execute.
package engine
