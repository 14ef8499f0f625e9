// Package works executes the Works of push Clusters.
package works
