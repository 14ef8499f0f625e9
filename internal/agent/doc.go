// Package agent is the member side: fetch, converge, report, on a loop.
package agent
