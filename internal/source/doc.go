// Package source reads the content and the charts that a profile refers to.
//
// internal/hub/summaries calls it for each feature of a ClusterSummary. internal/render then makes objects of the
// result. internal/hub/outdated calls Charts.Newest to find newer versions of deployed charts.
//
// The steps for a policyRef: ResolvePolicyRef expands the templates in the reference. Contents.Manifests reads the
// ConfigMap, the Secret, the artifact of the Flux source, or the last content that the RemoteFetcher fetched from the
// URL. Contents.Kustomization has the same steps for a kustomizationRef, and Contents.Values for valuesFrom.
//
// The steps for a chart: ExpandChart expands the templates in its fields, and LoginFor and VerificationFor read its
// Secrets. Charts.Fetch returns the archive from a repository, or Charts.Package from a directory in a Flux source.
//
// Terms:
//
//   - Content: the files of one ConfigMap, Secret, Flux source or URL, with a digest.
//   - Artifact: the archive of a Flux source, which Flux's source-controller serves.
//   - TemplateContext: the cluster for which templates are expanded, and the hub namespace that they may read.
//   - Resources: the objects of the hub that templates and scripts can read. internal/hub/resources reads them.
//   - Script: content in Lua that returns manifests. internal/script runs it.
//   - Substitute: expand templates whose data are values, and not the fields of a cluster.
//   - Login: the credentials and the transport options for a repository. Its digest is part of the cache keys: a chart
//     that was fetched with one login is not returned for another one.
//   - Verification: the provenance file and the cosign signature that a chart must have.
//   - Repository: a chart repository with an index.yaml (http, https), or an OCI registry (oci).
//   - Archive: the .tgz file of a chart. Its file name is its digest.
//
// Invariants:
//
//   - An exact version in the cache is not requested again. For a range, the index or the tags are requested at most
//     once a minute. A missing chart is requested at most every 10 seconds.
//   - An archive is stored for a Verification only after it has been verified.
//   - Errors that a user must correct are phase.TerminalError. Errors about missing objects and charts wrap
//     ErrNotFound. All other errors are transient, and the caller retries. No error contains data of a Secret.
//   - The same problem has the same message, so that the status of a ClusterSummary does not change on each retry.
//
// Start reading at Charts.Fetch in charts.go and at Contents.Manifests in content.go.
package source
