package summaries

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/engine"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/release"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// patchReferences returns the references in patchesFrom that can be resolved, and the first error.
func patchReferences(r ComposeRequest) ([]source.Reference, error) {
	var all []source.Reference
	var first error
	for _, ref := range r.Summary.Spec.ClusterProfileSpec.PatchesFrom {
		resolved, err := source.ResolveValueFrom(ref, r.TemplateContext)
		if err == nil {
			all = append(all, resolved)
		} else if first == nil {
			first = err
		}
	}
	return all, first
}

// hasPatchTemplate returns whether an inline patch is a template.
func hasPatchTemplate(spec configv1beta1.ProfileSpec) bool {
	return slices.ContainsFunc(spec.Patches, func(p libv1beta1.Patch) bool { return strings.Contains(p.Patch, "{{") })
}

// loadChanges reads the patches, the labels and the annotations of a profile, and expands the templates in patches. As
// in Sveltos, the patches have this order: the patches of the spec, the patches from objects with the template
// annotation, and the patches from other objects.
func (c *Composer) loadChanges(ctx context.Context, r ComposeRequest) (render.Changes, error) {
	spec := r.Summary.Spec.ClusterProfileSpec
	changes := render.Changes{Labels: spec.ExtraLabels, Annotations: spec.ExtraAnnotations, Scope: r.TemplateContext.RestrictedNamespace, Memory: r.TemplateContext.Memory}
	if err := changes.Validate(); err != nil {
		return render.Changes{}, withReason(status.ReasonRender, err)
	}
	if err := engine.CheckDriftExclusions(spec.DriftExclusions); err != nil {
		return render.Changes{}, withReason(status.ReasonRender, phase.TerminalError{Err: err})
	}
	for i, patch := range spec.Patches {
		origin := fmt.Sprintf("patches[%d]", i)
		text, err := r.TemplateContext.Expand(origin, patch.Patch)
		if err != nil {
			return render.Changes{}, withReason(status.ReasonRender, err)
		}
		isPrivate := r.TemplateContext.Resources.HasSecret && text != patch.Patch
		changes.Patches = append(changes.Patches, render.Patch{Origin: origin, Text: text, Target: patch.Target, IsPrivate: isPrivate})
	}
	var expanded, plain []render.Patch
	for _, ref := range spec.PatchesFrom {
		content, err := c.Contents.Values(ctx, ref, r.TemplateContext)
		if err != nil {
			return render.Changes{}, withReason(status.ReasonSource, fmt.Errorf("patchesFrom: %w", err))
		}
		patches, err := decodePatches(content, r.TemplateContext)
		if err != nil {
			return render.Changes{}, withReason(status.ReasonRender, err)
		}
		changes.Sensitive = changes.Sensitive || content.Sensitive
		if content.Template {
			expanded = append(expanded, patches...)
		} else {
			plain = append(plain, patches...)
		}
	}
	changes.Patches = slices.Concat(changes.Patches, expanded, plain)
	return changes, nil
}

// decodePatches returns the patches in an object of patchesFrom, in the order of its keys. Errors about a patch that is
// from a Secret, or whose template can read one, do not show its text.
func decodePatches(content source.Content, tmplCtx source.TemplateContext) ([]render.Patch, error) {
	var all []render.Patch
	for _, file := range content.Files {
		origin := fmt.Sprintf("patchesFrom %s, key %s", content.Reference, file.Name)
		text, err := string(file.Data), error(nil)
		if content.Template {
			text, err = tmplCtx.Expand(origin, text)
		}
		isPrivate := content.Sensitive
		var patches []render.Patch
		if err == nil {
			isPrivate = content.WithSensitivityOf(tmplCtx).Sensitive
			patches, err = render.DecodePatches(origin, text, tmplCtx.Memory)
		}
		if err != nil && isPrivate {
			err = source.HideDetails(origin, err)
		}
		if err != nil {
			return nil, err
		}
		for _, patch := range patches {
			patch.IsPrivate = isPrivate
			all = append(all, patch)
		}
	}
	return all, nil
}

// inputsDigestWithChanges returns the digest of a release's inputs and of the changes, since another patch can require
// another revision. It returns "" if inputsDigest is "": the chart does not read its revision.
func inputsDigestWithChanges(inputsDigest string, changes render.Changes) (string, error) {
	digest, err := changes.Digest()
	if inputsDigest == "" || digest == "" || err != nil {
		return inputsDigest, err
	}
	sum := sha256.Sum256([]byte(inputsDigest + " " + digest))
	return hex.EncodeToString(sum[:]), nil
}

// applyChanges applies the changes to the items of a bundle.
func (c *Composer) applyChanges(changes render.Changes, composed composedItems) (composedItems, error) {
	if changes.IsEmpty() {
		return composed, nil
	}
	items := make([]bundle.Item, 0, len(composed.items))
	for _, item := range composed.items {
		changed, err := c.Changer.Change(item.Objects, item.Documents, changes, unpatchedObjects(item, composed.unpatchedHooks))
		if err == nil {
			err = changes.Memory.AddDocuments(changed.Documents)
		}
		if err != nil && item.Release != nil {
			err = fmt.Errorf("helm release %s/%s: %w", item.Release.Namespace, item.Release.Name, err)
		}
		if err != nil {
			return composedItems{}, withReason(status.ReasonRender, err)
		}
		if len(changed.Objects) == 0 && item.Release == nil {
			continue // the patches have deleted all objects
		}
		item.Objects, item.Documents = changed.Objects, changed.Documents
		item.Sensitive = item.Sensitive || changes.Sensitive || render.HasSecret(changed.Objects)
		item.OnlySecretsPrivate = item.OnlySecretsPrivate && !changes.Sensitive
		if item.Release != nil {
			item.Release = releaseWithPaths(*item.Release, changed.Indexes)
		}
		items = append(items, item)
	}
	composed.items = items
	digest, err := changes.Digest()
	if err != nil {
		return composedItems{}, withReason(status.ReasonRender, phase.TerminalError{Err: err})
	}
	composed.releases = slices.Clone(composed.releases)
	for i := range composed.releases {
		composed.releases[i].PatchesHash = c.HashKey.Hash([]byte(digest))
	}
	return composed, nil
}

// unpatchedObjects returns the indexes of the objects of an item that must not be patched: objects from the crds
// directories of a chart, which Helm does not post-render either, and the hooks of the releases in unpatchedHooks.
func unpatchedObjects(item bundle.Item, unpatchedHooks []match.Release) []int {
	if item.Release == nil {
		return nil
	}
	omitsHooks := slices.Contains(unpatchedHooks, match.Release{Namespace: item.Release.Namespace, Name: item.Release.Name})
	var indexes []int
	for i, object := range item.Objects {
		if release.IsFromCRDFile(item, i) || omitsHooks && bundle.IsHook(object) {
			indexes = append(indexes, i)
		}
	}
	return indexes
}

// releaseWithPaths returns a copy of a release with only the template paths at indexes, which are the paths of the
// objects that remain after the changes.
func releaseWithPaths(r bundle.Release, indexes []int) *bundle.Release {
	paths := make([]string, 0, len(indexes))
	for _, i := range indexes {
		if i < len(r.Data.Paths) {
			paths = append(paths, r.Data.Paths[i])
		}
	}
	r.Data.Paths = paths
	return &r
}
