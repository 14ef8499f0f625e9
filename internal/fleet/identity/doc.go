// Package identity gets tokens for members from the clouds that they run in, with the hub's own cloud identity.
package identity
