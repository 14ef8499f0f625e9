package diagnostics

import (
	"net/http"
	"net/http/pprof"

	"k8s.io/client-go/rest"
)

// Handler returns a handler that serves metrics on /metrics, and the profiles of package net/http/pprof below
// /debug/pprof/. All paths are protected with RequireAuthorization. Profiles have names of functions and sizes, but no
// content of memory. The command line of the process is not served.
func Handler(config *rest.Config, metrics http.Handler) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return RequireAuthorization(config, mux)
}
