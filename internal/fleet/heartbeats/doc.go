// Package heartbeats evaluates whether the agents of pull members are alive. All controllers of the hub share one
// Monitor, so that they never disagree.
package heartbeats
