// Package render turns content plus values into Kubernetes objects, without a cluster or a clock.
package render
