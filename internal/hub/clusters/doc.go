// Package clusters finds out how every member is and says so on its SveltosCluster.
package clusters
