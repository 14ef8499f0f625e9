// Package status computes the status and the events of ClusterSummaries from reports.
//
// A reconcile has one FeatureResult for each feature that it handled. The ResultKind is Delivered (with the member's
// report), Failed, Skipped, Withdrawing or Withdrawn. ComputeStatus computes the new status from the old status and the
// results (compute.go), after MergeLocal has combined the results for a member and for the hub's own cluster
// (merge.go). Events compares the two statuses and returns the events to record (events.go).
//
// SetDeployedFeature computes the status of the ClusterConfiguration of a member, which lists the objects and releases
// of all profiles for users (configuration.go). The engine has an inventory of its own.
//
// All functions are pure. hub/summaries writes their results to the API server.
package status
