// Package fleet defines Member, one type for clusters of every kind, and gives clients for them.
//
// The controllers of the hub read the cluster objects with Get, List or FromObject and then use only the Member. So
// push and pull mode, and the kinds SveltosCluster and Cluster, need no branches elsewhere.
//
// Files, in reading order:
//
//  1. member.go: Member, its ID and its modes.
//  2. sveltos.go and karmada.go convert the two kinds of objects; kinds.go has a table of both kinds and the functions
//     that use it.
//  3. delivery.go: the hub namespace with the groups and bundles of a pull member.
//  4. clients.go: Clients returns a cached client configuration for each push member: from a kubeconfig, from the
//     endpoint and the token Secret of a Cluster (accessconfig.go), or from a cloud identity (identityconfig.go,
//     identitypolicy.go, package identity). transport.go limits the connections to all of them.
//  5. probe.go reads the version and the APIs of a cluster. Package heartbeats evaluates the heartbeats of agents.
//  6. shard.go selects the clusters of one shard of hubs. deregister.go reads and writes the annotations of a
//     deregistration: its options, and the list of objects that were left behind.
//
// Words:
//
//   - member: a managed cluster. The object that declares it is a SveltosCluster or a Cluster.
//   - push, pull: the hub connects to the member, or the agent in the member connects to the hub.
//   - refused: Towline must not touch the cluster, because its object has a name, namespace or field that is not
//     accepted, or the same spec.id as an older Cluster. Member.Refused has the message.
//   - execution space: the hub namespace karmada-es-<name> of a Cluster. It is the namespace of its Member.
//   - group: a ConfigurationGroup, which carries a bundle to the agent of a pull member.
//   - delivery namespace: the hub namespace with the groups of a pull member.
//   - access: endpoint, proxy and token Secret in the spec of a Cluster.
//   - scope: the UID of a Cluster, which separates the inventories of successive registrations. It is empty for a
//     SveltosCluster.
//
// Start reading at Member and FromSveltosCluster.
package fleet
