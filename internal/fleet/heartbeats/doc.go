// Package heartbeats judges whether the agents of pull members are alive.
package heartbeats
