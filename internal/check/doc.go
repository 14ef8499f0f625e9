// Package check asks a cluster whether the conditions hold that people wrote for it in Lua.
package check
