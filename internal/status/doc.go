// Package status computes the status and the events of ClusterSummaries from reports.
package status
