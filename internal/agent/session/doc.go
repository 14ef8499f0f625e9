// Package session is what the agents of every surface have in common: one way to the hub, the deliveries that come over it, and leaving.
package session
