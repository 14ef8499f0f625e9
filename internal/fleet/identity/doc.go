// Package identity gets tokens for members from cloud providers, with the hub's own cloud identity.
//
// New returns the Source of one member, and Source.Wrap a transport that sends its tokens (transport.go). A Source
// keeps one token and renews it before it expires, once for all concurrent requests (source.go). The issuers of the
// providers are in aws.go, azure.go and gcp.go: EKS accepts a presigned request to STS, AKS and GKE accept OAuth
// tokens. Errors are one line without secrets, because they are written to the status of a cluster (error.go).
package identity
