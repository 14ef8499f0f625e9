// Package hub is the management side: every controller, wired in the order of the journey.
package hub
