// Package phase runs a reconcile as a named list of steps and ends it in exactly one outcome.
package phase
