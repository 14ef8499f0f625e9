// Package source fetches what a profile points at into a read-only, digest-named file tree.
package source
