// Package rolerequests deploys the Roles of each RoleRequest with a ClusterProfile that it generates.
//
// A RoleRequest gives a ServiceAccount of members rights, so that profiles can be deployed as this ServiceAccount. The
// steps of a reconcile are:
//
//  1. Set the finalizer.
//  2. Compile the Roles and ClusterRoles in spec.roleRefs: rename them, and add a binding to the ServiceAccount to
//     each.
//  3. Write them into a Secret in the namespace projectsveltos, and a ClusterProfile that deploys the Secret.
//  4. Report the matching clusters of the ClusterProfile, and the failure.
//
// If the RoleRequest is being deleted, the ClusterProfile is deleted, which withdraws the Roles, then the Secret, and
// then the finalizer is removed.
//
// Invariants:
//
//   - A RoleRequest that cannot be compiled changes nothing that was deployed before.
//   - The name of a Role on a member has the name of its RoleRequest. So RoleRequests share no objects, and a Role of
//     the member is never changed.
//   - A Secret and a ClusterProfile of the same name that this controller has not generated are neither changed nor
//     deleted.
//
// Start reading at Controller.Reconcile.
package rolerequests
