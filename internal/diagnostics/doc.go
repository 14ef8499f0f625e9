// Package diagnostics serves the health of a process to all clients, and its metrics and profiles to clients that a
// Kubernetes API authorises.
package diagnostics
