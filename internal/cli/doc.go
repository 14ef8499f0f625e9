// Package cli turns arguments into calls of the packages above and errors into exit codes.
package cli
