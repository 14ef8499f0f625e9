// Package logkeys lists the keys of structured log lines, so that one fact has one name everywhere.
package logkeys

// The keys. A member is "namespace/name"; a bundle is named by its ID.
const (
	Member  = "member"
	Profile = "profile"
	Summary = "summary"
	Bundle  = "bundle"
	Group   = "group"
	Count   = "count"
	Reason  = "reason"
	// Digest is the digest of a bundle; Duration is a Go duration.
	Digest   = "digest"
	Duration = "duration"
)
