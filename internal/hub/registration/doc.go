// Package registration creates the objects on the hub that a SveltosCluster needs to be registered.
//
// The hub runs Controller for the SveltosClusters of its shard. A reconcile removes the annotations of an earlier
// deregistration, and sets the finalizer. For a pull member it then ensures the identity of the agent (identity.go): a
// claim of a delivery namespace, a ServiceAccount, RBAC and a Lease. At last it ensures the manifest with which a user
// installs the agent. ClusterLocks exclude package deregistration, which deletes these objects.
//
// Start reading at Controller.Reconcile in controller.go.
package registration
