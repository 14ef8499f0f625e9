//go:build !linux

package agents

// releaseProgramPages does nothing on this operating system.
func releaseProgramPages() {}
