// Package profiles keeps one ClusterSummary per profile and matching cluster.
package profiles
