// Package approvals gives certificates to agents: to those of new clusters, which come with a bootstrap token, and their next one to those that are here.
package approvals
