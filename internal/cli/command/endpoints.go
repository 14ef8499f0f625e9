package command

import "github.com/spf13/pflag"

// AddEndpoints adds the flags for the endpoints of a hub or an agent.
func AddEndpoints(flags *pflag.FlagSet, diagnostics, health *string) {
	flags.StringVar(diagnostics, "diagnostics-address", ":8443",
		"`address` of /metrics and /debug/pprof/ over https, for clients with the permission to get these nonResourceURLs; empty to disable")
	flags.StringVar(health, "health-address", ":9440", "`address` of /healthz and /readyz over http; empty to disable")
}
