// Package survey asks a cluster how it is: its health, version and APIs, its nodes, and what its pods ask for.
package survey
