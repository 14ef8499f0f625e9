// Package hub is the management side of Towline: it wires all controllers of the hub and runs them.
//
// The command "towline hub" calls Run. Run serves health and metrics, installs the CRDs, creates a controller-runtime
// manager, adds all controllers in the order of the data flow, and starts the manager. With leader election only the
// leader of a shard runs the controllers.
//
// The controllers are in subpackages:
//
//   - registrations and departures register and deregister SveltosClusters; clusters checks their health.
//   - approvals approves the certificate requests of agents of Clusters; spaces manages the execution namespaces of
//     Clusters and removes Clusters; members checks their health.
//   - profiles creates a ClusterSummary for each profile and matching cluster. summaries renders its content, and
//     delivers it as bundles.
//   - works executes the Works of push Clusters.
//   - shards labels the objects of clusters with the shard, by which the cache of a hub selects them.
//   - unclaimed handles bundles on members that no ClusterSummary accounts for.
//   - outdated reports deployed charts with newer versions.
//
// This package has the parts that they share: one engine per push member (engines.go), the cache of ConfigMaps and
// Secrets (cache.go), leader election (leader.go), health (health.go) and metrics (collector.go, recorder.go).
//
// Terms: a hub serves a cluster if the cluster is in its shard. It serves the summaries of a cluster if, in addition,
// its cache has all of them (fleet.Shard.SeesAll). The default shard has all clusters without the shard annotation;
// only its hub runs the controllers that concern the whole fleet.
//
// Invariants:
//
//   - All state is in API objects. The engines, caches and counters in memory can be lost.
//   - One process per shard runs controllers. A leader that has not renewed its lease writes nothing, and exits unless
//     it renews the lease before another hub acquires it.
//   - Each push member has at most one running engine, and none after forget is called.
//
// Start reading at Run in hub.go, and then addControllers.
package hub
