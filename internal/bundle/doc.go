// Package bundle defines the Bundle that a hub delivers to a member, and the Report that it gets back.
//
// A requestor is the object on the hub that a bundle is for, for example a ClusterSummary. hub/summaries builds a
// Bundle per feature, deliver sends it or a Withdrawal to the member, and engine applies it there and returns a Report.
// Deployed describes the bundles that a member has. A Digest identifies the content of a bundle.
//
// The JSON of these types is stored on hubs and members, and Digest is calculated from it: names of JSON fields must
// not change. Start reading at Bundle.
package bundle
