// Package render renders content, with values, as Kubernetes objects.
//
// internal/hub/summaries calls it for the summary of a profile: Unsupported for the spec, ManifestRenderer.Render for
// policyRefs, Values and Charts.Render for helmCharts, NewKustomization and KustomizationRenderer.Render for
// kustomizationRefs. Then Changer.Change applies the patches, labels and annotations of the profile to the objects.
//
// Charts.Render has these steps:
//
//  1. Read the facts about the chart, and remove the inputs that it does not read from the request (facts.go).
//  2. Return the release from the cache that all members share, or render the chart for all members (chart.go).
//  3. If its templates generate values, or look up objects, render the chart again for this release on this member,
//     with its stored results and those that the member returns.
//
// Each rendering is a call in the sandbox (sandbox.go), which executes the templates with functions that use stored
// results (generated.go, lookup.go), and collects the objects (release.go).
//
// A kustomization is built with the library of kustomize in the sandbox (kustomize.go), in a file system that has only
// the files of its source (kustomize_tree.go). The built objects are the same for all members. If the reference has
// values, the hub then expands the objects that contain "{{" with them (kustomization.go).
//
// Terms:
//
//   - Rendering: the execution of all templates of a chart for one request. Release is its result.
//   - Generated: the stored results of template functions that return another value at each call (randAlphaNum, genCA,
//     now) and of lookup, for one release on one member. The caller stores them before it delivers the release.
//   - Rendered objects: the Secrets and ConfigMaps of a rendering that its templates look up. In pull mode lookup finds
//     them in the next upgrade, since the hub cannot read the member.
//   - Pending: rendered objects of a rendering that the member has possibly not started to deploy, see WithPending.
//   - Member-specific: the release depends on Generated or on lookup, so it is not shared and counts as sensitive.
//   - Unanswered: a lookup found nothing because the hub cannot read the member.
//   - Inputs: a digest of the chart, the values and the options. While it is the same, templates read the same revision
//     and the same operation ("install" or "upgrade"), and for each operation the same results of lookup.
//   - Scope: the namespace of a Profile, "" for ClusterProfiles (TemplateContext.RestrictedNamespace). Results are not
//     used in another scope.
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
