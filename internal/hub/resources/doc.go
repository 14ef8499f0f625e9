// Package resources reads and watches the objects of the hub that templates refer to (templateResourceRefs).
//
// internal/hub/summaries calls Watcher.Load in each reconcile of a ClusterSummary. The Watcher keeps the JSON of each
// object, once for all summaries that refer to it, and sends the summaries to Watcher.Changed when something of the
// object changes that counts for them.
//
//   - Watches: the metadata of all objects of a kind, as long as a summary refers to an object of the kind. Of each
//     object only the name, the UID and the version are kept. ConfigMaps and Secrets are watched by the hub anyway. The
//     number of kinds is limited, also for the Profiles of one namespace: see Watcher.assignNamespace.
//   - Reads: after an event of an object that is referred to, the object is read once, at most once a second.
//   - Pin: the version of an object that a reference sees. It stays until something changes that counts for the
//     reference. So a reference that ignores changes of the status sees the status of its pin in each reconcile.
//
// If the API server does not serve a kind, or the hub may not list it, the kind is requested again every few seconds:
// no watch reports when this changes.
//
// Start reading at Watcher.Load in load.go.
package resources
