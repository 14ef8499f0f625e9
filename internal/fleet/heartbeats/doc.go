// Package heartbeats evaluates whether the agents of pull members are alive. All controllers of the hub share one
// Monitor, so that they never disagree. Controllers that reconcile the status of a cluster call Evaluate. Callers that
// have just read the Lease from the API server call EvaluateLease.
package heartbeats
