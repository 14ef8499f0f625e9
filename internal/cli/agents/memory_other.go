//go:build !linux

package agents

// releaseProgram does nothing on this operating system.
func releaseProgram() {}
