// Package status computes the status and the events of ClusterSummaries from reports.
//
// A profile has up to three features: Resources, Helm and Kustomize. A reconcile has one FeatureResult for each feature
// that it handled. The ResultKind is Delivered (with the member's report), Failed, Skipped, Withdrawing or Withdrawn.
// First MergeLocal combines the results for a member with those for the hub's own cluster (merge.go). Then
// ComputeStatus computes the new status from the old status and the results (compute.go). Events compares the two
// statuses and returns the events to record (events.go).
//
// SetDeployedFeature computes the status of the ClusterConfiguration of a member, which lists the objects and releases
// of all profiles for users (configuration.go); ListDeployed describes them as texts (deployed.go). The engine does not
// read the ClusterConfiguration: it has an inventory on the member.
//
// All functions are pure. hub/summaries calls them and writes their results to the API server. Start reading at
// FeatureResult and ComputeStatus.
package status
