// Package clusterstatus reads the health, version, APIs, nodes and pod requests of a cluster.
//
// The agent of a Cluster member and the hub's controller for push members (internal/hub/clusters) create one Observer
// for each cluster. They call Run in a goroutine and Observe at each heartbeat, and write the returned status.
//
// Run keeps a reflector for nodes and one for pods (reflectors.go). A reflector converts each object to an entry, the
// small part that is counted (counters.go), because a cluster may have many thousand pods. A hub does not trust its
// members: the numbers of nodes and pods are limited, while they are listed and while they are counted. Each list and
// watch reports to a watchState (watchstate.go), so that Observe can report stale counters.
//
// Observe takes these steps (observer.go):
//
//  1. checkHealth requests /readyz, or /healthz on old clusters (health.go).
//  2. applyThresholds keeps the old condition Ready until a change of health has lasted long enough (thresholds.go).
//  3. If the cluster is healthy, discover reads its version and APIs, at most once a minute (apis.go). An API whose
//     server does not answer stays in the list.
//  4. summarize writes the numbers of nodes and pods, and the sums of resources (counters.go).
//
// Words:
//
//   - amounts: quantities of resources (resources.go). A load is a number of pods with their amounts.
//   - scheduled, unscheduled: a pod with or without a node. Karmada calls the sums of their requests allocated and
//     allocating.
//   - grade: the size class of a node by its free resources; spec.resourceModels defines the grades (models.go).
//   - synced: all nodes and pods were listed once.
//   - lost: list or watch has failed for a minute. From then on the counters are stale, and Observe removes them from
//     the status.
//   - streak: a series of equal health results.
//
// Failures are reported in conditions, not returned as errors. StableMessage gives the same text for the same cause,
// so that a status does not change at each observation.
//
// Start reading at Observer.Observe.
package clusterstatus
