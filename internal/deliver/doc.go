// Package deliver delivers bundles to members and returns their reports, in push and in pull mode.
//
// The hub's controllers call a Transport: Deliver makes a bundle the desired one of a member and returns the newest
// report, Withdraw removes a bundle. ByMode selects the Transport by the mode of the member:
//
//   - PushTransport runs the engine in the hub, with a client of the member.
//   - PullTransport writes the bundle to the hub's API server. In the member, AgentSource watches it, fetches it and
//     writes reports, and the agent runs the engine.
//
// In pull mode a bundle consists of these objects on the hub:
//
//   - A group (ConfigurationGroup) in the member's delivery namespace: the request to deploy or to withdraw one bundle,
//     with the digest of the bundle and references to its content. Its status is the agent's report.
//   - ConfigurationBundles: the content, one chunk each. They are immutable and named by a keyed hash of their content.
//     Content without secrets that several members get is stored once, in the hub's own namespace.
//
// A bundle has items (see package bundle). An item is encoded as a stream of JSON documents, which is compressed and
// split into chunks that fit into an API object. annotationHeader on a ConfigurationBundle has the header of its chunk.
//
// PullTransport writes the chunks before the group that refers to them, so an agent never sees a group without content.
// GarbageCollector deletes chunks that no group needs. An agent stores the content that it applies, so chunks are not
// needed after the group is provisioned; an agent that has lost its content reports StateMissing, and PullTransport
// writes the chunks again.
//
// Invariants:
//
//   - An unchanged bundle costs no request.
//   - A deleted group removes nothing from a member: only a group with the action Remove does.
//   - Nothing is delivered to a namespace that is not claimed for the member, see checkClaim.
//   - The agent trusts no content: it verifies hashes, limits sizes, and refuses unknown options.
//
// Groups of a Sveltos hub, which lack Towline's annotations, are accepted as far as their options are supported.
//
// Start reading at Transport in transport.go, PullTransport.Deliver in pull.go and AgentSource.Run in groups.go.
package deliver
