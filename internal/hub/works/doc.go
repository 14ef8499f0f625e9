// Package works has the Works of push Clusters carried out.
package works
