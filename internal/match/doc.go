// Package match computes the members of each profile, and the profile that manages each Helm release.
package match
