// Package cache keeps the results of functions up to a total size, and runs one function per key at a time.
package cache
