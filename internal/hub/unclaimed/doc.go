// Package unclaimed finds bundles on members that no ClusterSummary manages. It withdraws a bundle if there is evidence
// that it must be withdrawn. It reports the others in a condition of the cluster, with the command that withdraws them.
//
// A ClusterSummary with its finalizer withdraws its bundles before it is deleted. Bundles remain without a summary if a
// user removes the finalizer, if the hub is restored from a backup that is older than a delivery, or if an earlier
// version of Towline lost track of them. A missing summary or profile alone is no evidence.
//
// The hub runs Controller for the clusters of its shard. For each reachable cluster its steps are:
//
//  1. List the bundles on the cluster.
//  2. Gather the evidence about each bundle, and call decide. Withdraw the bundle if decide returns withdraw.
//  3. Delete the entries of withdrawn bundles from the ClusterConfiguration.
//  4. When all withdrawals are complete, delete the annotation by which a user requested withdrawals.
//  5. Report the bundles that are kept.
//
// The controllers that deregister clusters call BundleWithdrawer.Withdraw, which withdraws all bundles of this hub from
// a member.
//
// Terms:
//
//   - bundle: the objects of one feature of a profile on one cluster. Its ID names its ClusterSummary.
//   - claimed: a summary or a profile manages the bundle.
//   - kept: there is no evidence that the bundle must be withdrawn.
//   - listed: the ClusterConfiguration of the cluster, which lists deployed objects, has the feature of the bundle.
//   - requested: the bundle has a ConfigurationGroup on the hub (pull mode).
//   - on the hub: content with deploymentType Local is deployed to the hub's own cluster, in bundles of their own.
//
// Invariants:
//
//   - Evidence is read from the API server, not from the cache, and used at once.
//   - Bundles of another hub are withdrawn only at the user's request.
//
// Start reading at decide in decide.go, which has all rules, and then Controller.Reconcile in controller.go.
package unclaimed
