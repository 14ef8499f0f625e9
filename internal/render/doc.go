// Package render renders content, with values, as Kubernetes objects.
//
// internal/hub/summaries calls Unsupported for the spec of a profile, Manifests for its policyRefs, Values and
// Charts.Render for its Helm charts, and NewKustomization and KustomizationRenderer.Render for its kustomizationRefs.
//
// Charts.Render has these steps: it reads the facts about the chart, removes the inputs that the chart does not read
// from the request, and looks for the rendering in the cache that all members share. If it is missing, the chart is
// rendered for all members. If that rendering generates a value, or looks up an object that it renders itself, the
// chart is rendered again for this release on this member, with its stored results. A rendering starts a call in the
// sandbox (sandbox.go), which executes the templates (chart.go) with functions that use stored results (generated.go,
// lookup.go), and collects the objects (release.go).
//
// A kustomization is built with kustomize's library in the sandbox, in a file system that has the files of its source
// only (kustomize.go, kustomize_tree.go). The result is the same for all members. If there are values, the built
// objects that contain "{{" are expanded with them.
//
// Terms:
//
//   - Rendering: the execution of all templates of a chart for one request. Release is its result.
//   - Generated: the stored results of template functions that return another value at each call (randAlphaNum, genCA,
//     now) and of lookup, for one release on one member. The caller stores them before it delivers the release.
//   - Rendered objects: the Secrets and ConfigMaps of a rendering that its templates look up. In pull mode lookup finds
//     them in the next upgrade, since the hub cannot read the member.
//   - Pending: rendered objects of a rendering that the member has possibly not started to deploy, see Pend.
//   - Member-specific: the release depends on Generated or on lookup, so it is not shared and counts as sensitive.
//   - Unanswered: a lookup found nothing because the hub cannot read the member.
//   - Inputs: a digest of the chart, the values and the options. While it is the same, templates
//     read the same results of lookup, the same revision and the same operation.
//
// Invariants:
//
//   - Requests with the same inputs have the same release, in the same order, in every process.
//   - A value that a chart generates differs between members and never changes on one of them.
//   - Only template functions read a clock (such as now, date, ago and genCA) or a cluster (lookup). Nothing sends
//     requests to the network.
//
// Start reading at Charts.Render in chart.go.
package render
