// Package members keeps the status of Clusters true: it asks those of push mode how they are, and listens to the
// heartbeats of the others' agents.
package members
