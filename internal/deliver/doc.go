// Package deliver delivers bundles to members and returns their reports, in push and in pull mode.
//
// The hub's controllers call a Transport: Deliver makes a bundle the desired one of a member and returns the newest
// report, Withdraw removes a bundle. ByMode selects the Transport by the mode of the member:
//
//   - PushTransport (push.go) runs the engine in the hub, with a client of the member.
//   - PullTransport (pull.go, deployed.go) writes the bundle to the hub's API server. In the member, AgentSource
//     (agentsource.go, groups.go) watches and fetches it and writes reports, and the agent runs the engine.
//   - LocalTransport (local.go) runs the engine in the hub, for bundles with deploymentType Local: they are of a
//     member, and their objects are on the hub's own cluster.
//
// In pull mode a bundle consists of these objects on the hub:
//
//   - A group (ConfigurationGroup) in the member's delivery namespace: the request to deploy or to withdraw one bundle,
//     with the digest of the bundle and references to its content. Its status is the agent's report. A group is
//     provisioned when the report is Applied.
//   - ConfigurationBundles: the content, one chunk each. They are immutable and named by a keyed hash of their content.
//     Content without secrets that several members get is stored once, in the hub's own namespace. In this package
//     "content" means these objects, and "bundle" a bundle.Bundle.
//
// PullTransport.Deliver checks the claim of the namespace (claim.go), encodes each item of the bundle as a stream of
// JSON documents, which it compresses and splits into chunks (encode.go, codec.go), assigns a key to private chunks
// (encryption.go), creates the content, and then writes the group (wire.go): an agent never sees a group without
// content. AgentSource.Fetch verifies and decodes the content (decode.go).
//
// GarbageCollector (collector.go) deletes content that no group needs: an agent stores the bundle that it applies, so a
// provisioned group needs none. An agent that has lost its bundle reports StateMissing, and PullTransport writes the
// content again. contentTracker (tracker.go) keeps content whose group is not written yet.
//
// Invariants:
//
//   - An unchanged bundle costs no request.
//   - A deleted group removes nothing from a member: only a group with the action Remove does.
//   - No bundle is delivered to a namespace that is not claimed for the member, see checkClaim.
//   - The agent trusts no content of a Towline hub: it verifies hashes, limits sizes, and refuses unknown options.
//
// Groups of a Sveltos hub, which lack Towline's annotations, are accepted as far as their options are supported. Their
// content is verified if the group has its hash.
//
// Start reading at Transport in transport.go, PullTransport.Deliver in pull.go and AgentSource.Run in agentsource.go.
package deliver
