// Package source reads the content and the charts that a profile refers to.
//
// internal/hub/summaries calls it for each feature of a ClusterSummary, before internal/render makes objects of the
// result; internal/hub/outdated calls it to find newer versions of deployed charts.
//
// The steps for a policyRef: ManifestsReference expands the templates in the reference, Manifests reads the ConfigMap,
// the Secret, or the artifact of the Flux source. A RemoteFetcher polls the URLs that are in use, and Manifests returns
// their last content. Kustomization does so for a kustomizationRef. The steps for a chart: ExpandChart expands the
// templates in its fields, LoginFor and VerificationFor read its Secrets, Charts.Fetch returns the archive, or
// Charts.Package that of a directory in a Flux source, and Values reads the content of valuesFrom.
//
// Terms:
//
//   - Content: the data of one ConfigMap, Secret or Flux source on the hub, or the files behind a URL, with a digest.
//   - Artifact: the archive that Flux's source-controller serves of a source.
//   - Subject: the cluster for which templates are expanded, and the hub namespace that they may read.
//   - Resources: the objects of the hub that the templates and scripts of a profile can read. internal/hub/resources
//     reads them.
//   - Script: content in Lua that returns manifests. internal/script limits it.
//   - Substitute: to expand texts with values as their data, in place of the cluster.
//   - Login: the credentials and the transport options for a repository. It is part of the cache keys: a chart that was
//     fetched with one login is not returned for another one.
//   - Verification: the required provenance file and cosign signature of a chart.
//   - Repository: a chart repository with an index.yaml (http, https), or an OCI registry (oci).
//   - Archive: the .tgz file of a chart. Its name in the cache is its digest.
//
// Invariants:
//
//   - Exact versions in the cache are not requested again. A range requests the index, or the tags, at most once a
//     minute, and a chart that does not exist at most every 10 seconds.
//   - An archive is stored for a Verification only after it has been verified.
//   - Errors that a user must correct are phase.Invalid. Errors about missing objects and charts wrap ErrNotFound. All
//     others are transient, and the caller retries. No error has data of a Secret.
//   - The same problem has the same message, so that it does not change the status of a ClusterSummary again and again.
//
// Start reading at Charts.Fetch in charts.go and at Manifests in content.go.
package source
