// Package summaries reconciles ClusterSummaries: it builds the bundles of one profile for one cluster, delivers them,
// and reports the result.
//
// A profile has up to three features: Resources (policyRefs), Helm (helmCharts) and Kustomize (kustomizationRefs). Each
// feature becomes one bundle on the cluster. Controller.Reconcile runs these steps over one state:
//
//  1. checkCluster ends the reconcile if the cluster of the summary does not exist.
//  2. checkPreconditions ends the reconcile if the cluster is paused, unreachable, or being deregistered, or if the
//     profile is paused or unsupported.
//  3. findDeployed asks the transport which bundles the member has.
//  4. compose builds a bundle per feature: it reads the sources and renders them (compose*.go). It skips a
//     bundle that the member has applied and that was built from the same inputs (inputs.go).
//  5. addFinalizer adds the finalizer to the summary before the first delivery (finalizer.go).
//  6. reportStart writes the status Provisioning for a push member, since its delivery can take minutes. For a pull
//     member, report writes it if the agent has not reported a result after two seconds (starts.go).
//  7. deliver delivers the bundles through the transport of the cluster's mode.
//  8. withdrawFeatures withdraws the features that the profile no longer has.
//  9. recordDeployed gives the deployed objects to Configurations, the writer of ClusterConfigurations
//     (configurations.go).
//  10. cleanUpGenerated deletes the generated values of releases that are uninstalled (generated_owners.go).
//
// For a deleted summary steps 4 to 7 are skipped, and the finalizer is removed after everything is withdrawn or
// abandoned. A deregistration by force does not wait for an unreachable cluster (abandon.go).
//
// The steps add a status.FeatureResult per feature to the state. At the end of a reconcile status.ComputeStatus
// computes the new status from the results and the old status, and report writes it. The deployed features are read
// from the member or its ConfigurationGroup, and from the status in case their record was lost.
//
// Terms:
//
//   - inputs: the versions of everything that a bundle is built from.
//   - Composition: the bundle of a feature, with the fields of the status that describe it.
//   - generated values: results of random functions in a chart. A Secret on the hub keeps them per release, so that the
//     next rendering gets the same values (generated.go).
//   - own write: a status write of this process. Its watch event causes no reconcile (ownwrites.go).
//   - reference: an object of the hub that a bundle is built from. Its changes reconcile the summary (references.go).
//   - conflict: a Helm release of the summary that another summary manages (releases.go).
//   - outdated release: a release that the member has not started to deploy, because the rendered revision is not the
//     next one by the release records. It is rendered again. A release is unconfirmed until the member has compared the
//     revision.
//   - orphan: withdraw a bundle and keep its objects. Abandon: delete the summary without a withdrawal (abandon.go).
//
// Start reading at Controller.Reconcile and Composer.Compose.
package summaries
