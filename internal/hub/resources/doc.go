// Package resources reads and watches the objects of the hub that templates refer to (templateResourceRefs).
//
// Package summaries calls Watcher.Load in each reconcile of a ClusterSummary. The Watcher keeps the JSON of each object
// once for all summaries that refer to it. When relevant fields of the object change, it sends the summaries to
// Watcher.Changed. A reference selects the relevant fields by watchFields and ignoreStatusChanges.
//
//   - Reference: a source.ResourceReference, which is an entry of templateResourceRefs with expanded templates.
//   - Watch: an informer for the metadata of all objects of a kind, while a summary refers to an object of the kind. It
//     keeps only the name, the UID and the version of each object. The hub's cache already watches ConfigMaps and
//     Secrets. The number of kinds is limited: see Watcher.assignNamespace.
//   - Read: after an event of a referenced object, the object is read once, and at most once a second.
//   - Pin: the version of an object that Load returns for a reference. It is replaced when a relevant field changes. So
//     a reference with ignoreStatusChanges gets the same old status in each reconcile.
//
// If the API server does not serve a kind, or the hub may not list it, the Watcher retries every few seconds, since no
// event reports that the kind can be watched now.
//
// Start reading at Watcher.Load in load.go, then Watcher.onEvent in watcher.go and Watcher.refresh in load.go.
package resources
