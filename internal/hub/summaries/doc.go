// Package summaries reconciles ClusterSummaries: it builds the bundles of one profile for one cluster, delivers them,
// and reports the result.
//
// A profile has up to three features: Resources (policyRefs), Helm (helmCharts) and Kustomize (kustomizationRefs). Each
// feature becomes one bundle on the cluster. Controller.Reconcile runs these steps over one state:
//
//  1. load reads the cluster of the summary.
//  2. checkPreconditions ends the reconcile if the cluster is paused, unreachable, or being deregistered, or if the
//     profile is paused or unsupported.
//  3. findDeployed asks the transport which bundles the member has.
//  4. compose builds a bundle per feature: it reads the sources and renders them (compose.go, releases.go).
//  5. addFinalizer protects the summary before the first delivery (finalizer.go).
//  6. reportStart writes the status Provisioning of new and changed bundles, since a delivery to a push member can take
//     minutes.
//  7. deliver delivers the bundles through the transport of the cluster's mode.
//  8. withdrawFeatures withdraws the features that the profile no longer has.
//  9. recordDeployed writes the ClusterConfiguration of the cluster, which lists what is deployed (inventory.go).
//  10. cleanUpGenerated deletes the generated values of releases that are uninstalled (generated_owners.go).
//
// For a deleted summary steps 4 to 7 are left out, and the finalizer is removed once everything is withdrawn or
// abandoned. A deregistration by force does not wait for an unreachable cluster (abandon.go).
//
// The steps add Findings to the state. At the end of a reconcile status.Fold makes the new status from them and the old
// one, and report writes it. The deployed features are read from the member or its ConfigurationGroup. The status adds
// only features that are missing there because a record was lost.
//
// Words:
//
//   - Composition: the bundle of a feature, with the fields of the status that describe it.
//   - generated values: results of random functions in a chart. A Secret on the hub keeps them per release, so that the
//     next rendering gets the same values (generated.go).
//   - own write: a status write of this process. Its watch event causes no reconcile (ownwrites.go).
//   - reference: an object of the hub that a bundle is built from. Its changes reconcile the summary (references.go).
//
// Start reading at Controller.Reconcile and Composer.Compose.
package summaries
