// Package unclaimed finds bundles on members that no ClusterSummary accounts for. It withdraws those whose withdrawal was ordered, and reports
// the rest on the cluster with the command that withdraws them.
//
// A ClusterSummary with its finalizer withdraws what it delivered before it is gone. Bundles are left without one if somebody removes the
// finalizer, if the hub is restored from a backup that is older than a delivery, or if an earlier version of Towline lost track of them. A
// missing summary or profile does not authorize a withdrawal. See decide for what does.
package unclaimed
