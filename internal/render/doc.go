// Package render turns content plus values into Kubernetes objects.
package render
