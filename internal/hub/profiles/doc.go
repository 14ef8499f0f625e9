// Package profiles maintains one ClusterSummary for each profile and matching cluster.
//
// The hub runs Controller once for each kind of profile: ClusterProfile and Profile. The steps of a reconcile are:
//
//  1. Load the summaries of the profile, and set its finalizer.
//  2. Stop if the profile is paused.
//  3. Match the clusters.
//  4. Create missing summaries, update different ones, and delete the summaries of clusters that no longer match.
//     Package summaries withdraws their deployments.
//  5. Retry later if a summary could not be created: its namespace is missing, or a summary of an earlier profile is
//     still terminating.
//  6. Report the matching clusters, and the reason of a suspension, in the status of the profile.
//
// If the profile is being deleted, all summaries are deleted, and then the finalizer is removed.
//
// An event of a cluster reconciles the profiles whose match it can change (events.go). Each reconcile reads all
// clusters and summaries from the cache, so a lost event only delays a change until the next reconcile.
//
// Words:
//
//   - unsupported: the profile uses fields that are not supported yet.
//   - invalid: clusterSelector cannot be parsed.
//   - suspended: the profile is unsupported, invalid or paused, or waits for the deletion of an earlier profile's
//     summary. The reason is in its status. Summaries are still written, except while it is paused or invalid.
//   - matching cluster: a selected cluster for which one of these holds: it is ready, it has a summary, or clusterRefs
//     names it. Each matching cluster gets a summary.
//   - refused: a member with a name, a namespace or a field that Towline does not support (fleet.Member.Refused).
//   - earlier profile: a profile object with the same kind and name and another UID: it was deleted, or the hub was
//     restored from a backup.
//   - OneTime: the sync mode in which a summary keeps the spec that was deployed.
//
// Invariants:
//
//   - Normally the owner reference and the spec identify a summary, and not its name or its labels. Exception: a
//     summary of an earlier profile is found by its name. Then its owner, or its label if it has no owner, must name
//     the profile (kind.isCreatedFor).
//   - Before a summary is deleted, stopMatchingBehavior is updated from the profile, and the pause annotation is
//     deleted: both affect the withdrawal.
//   - Labels and annotations that others set on a summary stay, except the pause annotation: the profile determines it.
//   - After a restore of the hub, a profile takes over the summaries of an earlier profile with the same name. It finds
//     them by their names: match.SummaryName, or match.DistinctSummaryName if the summary of another profile has the
//     first name.
//
// Start reading at reconciler.Reconcile in controller.go; the steps are in steps.go.
package profiles
