// Package registrations makes what a cluster needs on the hub to join the fleet, for everyone who wrote a SveltosCluster.
package registrations
