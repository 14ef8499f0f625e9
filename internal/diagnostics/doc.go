// Package diagnostics serves the health of one process to anybody, and its metrics to whom a Kubernetes API lets.
package diagnostics
