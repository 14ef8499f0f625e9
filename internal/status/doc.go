// Package status computes the status and the events of ClusterSummaries from reports.
//
// A reconcile has one FeatureResult for each feature that it handled: the bundle was delivered (with the member's
// report) or could not be built, nothing was tried, or the feature is being withdrawn or was withdrawn. ComputeStatus
// computes the new status from the old status and the results. Events compares the two statuses and returns the events
// to record.
//
// SetDeployedFeature computes the status of the ClusterConfiguration of a member: the objects and releases of all
// profiles. It is not the inventory of the engine.
//
// All functions are pure. hub/summaries writes their results to the API server.
package status
