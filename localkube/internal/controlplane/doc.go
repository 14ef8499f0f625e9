// Package controlplane runs etcd, the Kubernetes API server, the controllers that matter and the scheduler in this process.
package controlplane
