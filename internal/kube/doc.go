// Package kube talks to one Kubernetes API: scheme, clients, server-side patches, conditions, object identity.
package kube
