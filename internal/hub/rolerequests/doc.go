// Package rolerequests deploys the Roles of each RoleRequest with a generated ClusterProfile.
//
// A RoleRequest grants rights to a ServiceAccount on members. Profiles can then be deployed as this ServiceAccount. The
// steps of a reconcile are:
//
//  1. Set the finalizer.
//  2. Compile the Roles and ClusterRoles in spec.roleRefs: rename them, and add a binding to the ServiceAccount for
//     each.
//  3. Write them into a Secret in the namespace projectsveltos, and a ClusterProfile that deploys the Secret.
//  4. Report the matching clusters of the ClusterProfile and the failure in the status.
//
// If the RoleRequest is being deleted, the ClusterProfile is deleted, which withdraws the Roles, then the Secret, and
// then the finalizer is removed.
//
// Invariants:
//
//   - If a RoleRequest cannot be compiled, the earlier Roles stay deployed.
//   - The name of a Role on a member contains the name of its RoleRequest. So RoleRequests share no Roles, and other
//     Roles on the member are never changed.
//   - A Secret or ClusterProfile of the generated name that this controller has not created is never changed or
//     deleted.
//
// Start reading at Controller.Reconcile in controller.go.
package rolerequests
