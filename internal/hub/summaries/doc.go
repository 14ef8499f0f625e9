// Package summaries reconciles ClusterSummaries: it builds the bundles of one profile for one cluster, delivers them,
// and reports the result.
//
// A profile has up to three features: Resources (policyRefs), Helm (helmCharts) and Kustomize (kustomizationRefs). Each
// feature becomes one bundle on the cluster. Package hub starts the Controller. Controller.Reconcile runs these steps,
// which share one state:
//
//  1. checkCluster and checkSuspended end the reconcile if the cluster does not exist or is being deregistered, or if
//     the cluster or the profile is paused.
//  2. withdrawLocal withdraws the features that the profile no longer deploys to the hub's own cluster (local.go).
//  3. checkSupported and checkReachable end the reconcile if the profile has unsupported fields, or if the member is
//     unreachable.
//  4. findDeployed reads from the transport which bundles the member has.
//  5. compose builds a bundle per feature: it reads the sources and renders them (compose*.go). It skips a feature if
//     the member has applied a bundle that was built from the same inputs (inputs.go).
//  6. addFinalizer adds the finalizer to the summary before the first delivery (finalizer.go).
//  7. reportStart writes the status Provisioning for a push member, since its delivery can take minutes. For a pull
//     member, report writes it if the agent has not reported a result after two seconds (starts.go).
//  8. deliver delivers the bundles through the transport of the cluster's mode.
//  9. withdrawFeatures withdraws the features that the profile no longer has (withdraw.go).
//  10. recordDeployed gives the lists of deployed objects to Configurations, the writer of ClusterConfigurations
//     (configurations.go).
//  11. cleanUpGenerated deletes the generated values of releases that are uninstalled (generated_owners.go).
//
// For a deleted summary, checkSupported and steps 5 to 8 are skipped, and the finalizer is removed after all bundles
// are withdrawn or abandoned. A deregistration by force does not wait for an unreachable cluster (abandon.go).
//
// The steps add a status.FeatureResult per feature to the state. At the end status.ComputeStatus computes the new
// status from the results and the old status, and report writes it (status.go).
//
// Terms:
//
//   - bundle: the objects of one feature, in items: one per reference or Helm release (package bundle).
//   - transport: delivers bundles to a member, withdraws them, and returns the reports of the member (package deliver).
//     In push mode the engine in the hub applies bundles. In pull mode the transport writes ConfigurationGroups, and
//     the agent applies them and reports in their status.
//   - record: the inventory of a bundle on the member. Release record: Helm's Secret for one revision of a release.
//   - inputs: the versions of all objects and settings that a bundle is built from.
//   - Composition: the bundle of a feature, with the fields of the status that describe it.
//   - changes: the patches, labels and annotations of the profile, which are applied to all rendered objects
//     (changes.go).
//   - local: of the hub's own cluster, to which content with deploymentType Local is deployed (local.go).
//   - generated values: results of random functions in a chart. A Secret on the hub keeps them per release, so that the
//     next rendering gets the same values (generated.go).
//   - own write: a status write of this process. Its watch event causes no reconcile (ownwrites.go).
//   - reference: an object of the hub that a bundle is built from. Its changes reconcile the summary (references.go).
//   - conflict: a Helm release of the summary that another summary manages (releases.go).
//   - outdated release: a release that was rendered for another revision than the next one in the release records of
//     the member. The member does not deploy it, and the hub renders it again. Until the member has compared the
//     revisions, the release is unconfirmed.
//   - orphan: withdraw a bundle and keep its objects. Abandon: delete the summary without a withdrawal (abandon.go).
//
// Start reading at Controller.Reconcile and Composer.Compose.
package summaries
