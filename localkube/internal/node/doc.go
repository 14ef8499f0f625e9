// Package node is one simulated Kubernetes node: it runs the pods of chosen images as processes and reports the others as running.
package node
