// Package command has the parts that the commands of both programs share: running a command (run.go), sections of flags
// in the help (sections.go), the flags of the log (log.go) and of the endpoints (endpoints.go), the commands version
// and sandbox (version.go, sandbox.go), and the config of the cluster of a pod (incluster.go).
package command
