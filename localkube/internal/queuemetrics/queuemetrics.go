// Package queuemetrics keeps work queues from measuring themselves.
package queuemetrics

import (
	_ "unsafe" // for go:linkname

	"k8s.io/client-go/util/workqueue"
)

// provider is upstream's default: no metrics. Its type is not exported.
//
//nolint:gochecknoglobals // upstream's, not ours
//go:linkname provider k8s.io/client-go/util/workqueue.globalMetricsProvider
var provider workqueue.MetricsProvider

// Each measured queue has a timer of 0.5 s, and an idle control plane has 63 of them. Only the first provider counts: packages are
// initialised in the order of their import paths as soon as what they import is, so this one comes before the package of k8s.io that
// sets the provider for Prometheus.
func init() { //nolint:gochecknoinits // see above
	workqueue.SetProvider(provider)
}
