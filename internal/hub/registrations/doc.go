// Package registrations creates the objects on the hub that a SveltosCluster needs to be registered.
package registrations
