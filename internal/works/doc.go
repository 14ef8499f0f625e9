// Package works applies the Works of an execution space to its cluster, and reports the result in their status.
//
// The hub's controller for push members (internal/hub/works) and the agent of pull members (internal/agent/karmada)
// call Executor.Execute for each Work. Both pass the Engine of the cluster and its ClusterState.
//
// Execute takes one of these paths (execute.go):
//
//  1. A Work without finalizer is not applied: the caller adds it first, with EnsureFinalizer.
//  2. A Work that is being deleted: remove its objects from the cluster, then its finalizer. With Orphan or
//     preserveResourcesOnDeletion the objects stay. With Abandon the cluster gets no request. While the cluster is
//     unreachable, the Work stays.
//  3. A Work of a cluster that is being deregistered is not applied any more.
//  4. A Work of an unreachable cluster: only its status is written. The health of all its objects is Unknown.
//  5. A suspended Work: the engine stops changing its objects.
//  6. Any other Work: Bundle converts its manifests (content.go) without server-set fields (serverfields.go), and the
//     engine applies them.
//
// Paths 5 and 6 then read the state of the objects and write the status (status.go): the conditions Applied and
// Dispatching, and the health and status of each object.
//
// Words:
//
//   - Work: Karmada's object for the manifests of one cluster. Its namespace is the execution space of the cluster.
//   - bundle, inventory, converge, withdraw, suspend: see internal/bundle and internal/engine.
//   - unresponsive: the cluster sent no response within the limit. A busy cluster sent some.
//   - stale: the Work on the hub is newer than the Work that Execute got.
//
// A condition has the same message for the same problem, so that a status is not written twice. Nothing is kept in
// memory: a new process continues from the status of the Work and the inventory on the cluster.
//
// Start reading at Executor.Execute.
package works
