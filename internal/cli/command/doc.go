// Package command has the parts that the commands of both programs share: running a command (run.go), sections of flags
// in the help (sections.go), and the flags of the log (log.go) and of the endpoints (endpoints.go).
package command
