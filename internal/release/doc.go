// Package release reads and writes Helm's release records on a cluster, and the hooks in them.
package release
