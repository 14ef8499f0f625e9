// Package karmada is the agent of a Cluster of the Karmada surface.
package karmada
