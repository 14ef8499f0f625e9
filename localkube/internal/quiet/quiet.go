// Package quiet keeps libraries from logging what is no error, where that can only be said before they are initialised.
package quiet

import "os"

// stderr is where this process prints its own errors.
var stderr = os.Stderr //nolint:gochecknoglobals // see init

// The API server's etcd client makes its logger, to os.Stderr, when its package is initialised, and warns of every request that is cut off
// when the control plane stops. Packages are initialised in the order of their import paths as soon as what they import is, so this one,
// which imports next to nothing, comes before those of k8s.io.
func init() { //nolint:gochecknoinits // see above
	if null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0); err == nil {
		os.Stderr = null
	}
}

// End gives the process its standard error back. Loggers that were made before stay quiet.
func End() { os.Stderr = stderr }
