package diagnostics

import (
	"net/http"
	"net/http/pprof"

	"k8s.io/client-go/rest"
)

// Handler returns a handler that serves metrics on /metrics, and the profiles of package net/http/pprof below
// /debug/pprof/. Each path needs the authorization that RequireAuthorization describes. Profiles have names of
// functions and sizes, and no content of memory. The command line, which pprof can serve too, is not served.
func Handler(config *rest.Config, metrics http.Handler) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return RequireAuthorization(config, mux)
}
