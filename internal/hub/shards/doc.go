// Package shards sets the label of the cluster's shard on the ClusterSummaries and ConfigurationGroups of each cluster.
// The cache of a hub selects them by this label.
//
// The hub runs Controller for the clusters of its shard. If a cluster is new in the shard, its objects may have another
// label. Then the steps are:
//
//  1. Set kube.AnnotationLabelledShard to fleet.BeingLabelled. From now on no hub reads the cluster's summaries.
//  2. List the summaries and groups from the API server, and set the label where it is missing or wrong.
//  3. Wait until the cache of this hub has all of them.
//  4. Set kube.AnnotationLabelledShard to the shard. Its hub now serves the summaries.
//
// The cache of the default shard's hub has the summaries of all shards. If a summary has a wrong label, for example
// because it was created while its cluster was moved, this hub executes step 1 for its cluster. The hub of the
// cluster's shard then continues.
//
// Invariants:
//
//   - A hub serves the summaries of a cluster only if its cache has all of them, since they all are needed to decide
//     which profile manages a Helm release.
//   - No object is deleted. An object that leaves a cache because its label changed still exists.
//   - A cluster that never had a shard other than the default one causes no request.
//
// Start reading at Reconcile in controller.go.
package shards
