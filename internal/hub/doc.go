// Package hub is the management side of Towline: it wires all controllers of the hub and runs them.
//
// The command "towline hub" calls Run. Run serves health and metrics, installs the CRDs, creates a controller-runtime
// manager, adds all controllers in the order of the data flow, and starts the manager. With leader election only the
// leader of a shard runs the controllers.
//
// The controllers are in subpackages:
//
//   - registration and deregistration register and deregister SveltosClusters; sveltosclusters checks their health.
//   - approvals approves the certificate requests of agents of Clusters; executionnamespaces manages the execution
//     namespaces of Clusters and removes Clusters; clusters checks their health.
//   - profiles creates a ClusterSummary for each profile and matching cluster. summaries renders its content, and
//     delivers it as bundles.
//   - works executes the Works of push Clusters.
//   - shards sets the shard label on the objects of clusters. The cache of a hub selects objects by this label.
//   - unclaimed withdraws or reports bundles on members that have no ClusterSummary.
//   - rolerequests deploys the Roles of RoleRequests with generated ClusterProfiles.
//   - outdated reports deployed charts that have newer versions.
//
// They share the packages resources and fluxsources, which watch objects that profiles refer to, and ratelimit and
// slots, which limit the work for one cluster or namespace. This package has the other shared parts: one engine per
// push member (engines.go), the cache of ConfigMaps and Secrets (contentcache.go), leader election (leader.go), health
// (health.go) and metrics (collector.go, recorder.go).
//
// Terms:
//
//   - serve: a hub serves a cluster if the cluster is in its shard. It reconciles the summaries of the cluster only
//     when all of them have the shard label, since its cache lacks the others (fleet.Shard.SeesAll).
//   - default shard: all clusters without the shard annotation. Only its hub runs the controllers that concern the
//     whole fleet.
//   - local: of the hub's own cluster, to which content with deploymentType Local is deployed (local.go).
//   - partition: the inventory records of the hub's own cluster that belong to the content of one cluster.
//   - release a member: cancel the operations of its engine, because this hub no longer manages the member.
//
// Invariants:
//
//   - All state is in API objects. The engines, caches and counters in memory can be lost.
//   - One process per shard runs controllers. A leader that cannot renew its Lease stops writing before the Lease
//     expires. It exits when another hub acquires the Lease.
//   - Each push member has at most one running engine. engines.forget stops it.
//
// Start reading at Run in hub.go, and then addControllers.
package hub
