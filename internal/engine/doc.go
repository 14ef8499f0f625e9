// Package engine makes one cluster equal one bundle: order, diff, apply, prune, drift, health.
package engine
