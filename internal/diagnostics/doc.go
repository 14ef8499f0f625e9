// Package diagnostics serves the health of a process to all clients, and its metrics and profiles to clients that a
// Kubernetes API authorises.
//
// The hub and the agent call Listen and Serve for two handlers: Health, without authorization, and Handler, which
// RequireAuthorization protects.
package diagnostics
