// Package works applies the Works of an execution space to its cluster, and reports the result in their status.
//
// The hub's controller for push members (internal/hub/works) and the agent of pull members (internal/agent/karmada)
// call Executor.Execute for each Work. Both pass the Engine of the cluster and its ClusterState.
//
// Execute takes one of these paths (execute.go):
//
//  1. A Work without finalizer is not applied: the caller adds it first, with EnsureFinalizer.
//  2. For a Work that is being deleted, the engine removes its objects from the cluster, and then Execute removes the
//     finalizer. With Orphan or preserveResourcesOnDeletion the objects stay. With Abandon the cluster gets no request.
//     While the cluster is unreachable, the Work stays.
//  3. A Work of a cluster that is being deregistered is not applied any more.
//  4. For a Work of an unreachable cluster, only the status is written. The health of all its objects is Unknown.
//  5. For a suspended Work, the engine stops changing its objects.
//  6. Any other Work: Bundle converts its manifests (content.go) without server-set fields (serverfields.go), and the
//     engine applies them.
//
// Paths 5 and 6 then read the state of the objects and write the status (status.go): the conditions Applied and
// Dispatching, and the health and status of each object.
//
// Words:
//
//   - Work: Karmada's object for manifests of one cluster. Its namespace is the execution space of the cluster.
//   - bundle, inventory, converge, withdraw, suspend: see internal/bundle and internal/engine.
//   - unresponsive: the cluster sent no response within the limit. A cluster that sent some is busy, not unresponsive.
//   - observation: the state of one object on the cluster, as the engine has read it.
//   - stale: the Work on the hub is newer than the argument of Execute.
//
// The same problem always gives the same message in a condition, so that the status is not written again. Nothing is
// kept in memory: a new process continues from the status of the Work and the inventory on the cluster.
//
// Start reading at Executor.Execute.
package works
