package summaries

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

// kustomizationReferences returns the references of the feature Kustomize that can be resolved, and the first error.
func kustomizationReferences(r ComposeRequest) ([]source.Reference, error) {
	all, first := patchReferences(r)
	add := func(ref source.Reference, err error) {
		if err == nil {
			all = append(all, ref)
		} else if first == nil {
			first = err
		}
	}
	for _, ref := range r.Summary.Spec.ClusterProfileSpec.KustomizationRefs {
		add(source.ResolveKustomizationRef(ref, r.TemplateContext))
		for _, values := range ref.ValuesFrom {
			add(source.ResolveValueFrom(values, r.TemplateContext))
		}
	}
	return all, first
}

// hasTemplates returns whether any field of refs can be a template.
func hasTemplates(refs any) bool {
	raw, err := json.Marshal(refs)
	return err != nil || bytes.Contains(raw, []byte("{{"))
}

// composeKustomizations reads and builds kustomizationRefs: by tier, then in list order.
func (c *Composer) composeKustomizations(ctx context.Context, r ComposeRequest) (composedItems, error) {
	refs := slices.Clone(r.Summary.Spec.ClusterProfileSpec.KustomizationRefs)
	slices.SortStableFunc(refs, func(a, b configv1beta1.KustomizationRef) int {
		return cmp.Compare(tierOrDefault(a.Tier), tierOrDefault(b.Tier))
	})
	var items []bundle.Item
	var contents []InputObject
	tiers := map[kube.Ref]int32{}
	for _, ref := range refs {
		kustomization, isSensitive, err := c.readKustomization(ctx, r, ref)
		if err != nil {
			return composedItems{}, err
		}
		contents = append(contents, InputObject{Reference: kustomization.Content.Reference, Version: kustomization.Content.Version})
		if len(kustomization.Content.Files) == 0 {
			continue // an optional reference to an object that does not exist
		}
		objects, documents, err := c.Kustomizations.Render(kustomization, r.TemplateContext)
		if err != nil {
			return composedItems{}, withReason(status.ReasonRender, err)
		}
		if err := r.TemplateContext.Memory.AddDocuments(documents); err != nil {
			return composedItems{}, withReason(status.ReasonRender, fmt.Errorf("%s: %w", kustomization, err))
		}
		if objects = withoutOverridden(objects, tierOrDefault(ref.Tier), tiers); len(objects) == 0 {
			continue
		}
		kind, namespace, name := kustomization.Content.Reference.Origin()
		items = append(items, bundle.Item{
			Objects:               objects,
			Documents:             documents,
			Reference:             bundle.Reference{Kind: kind, Namespace: namespace, Name: name, Tier: tierOrDefault(ref.Tier)},
			Sensitive:             isSensitive || render.HasSecret(objects),
			OnlySecretsPrivate:    !isSensitive,
			SkipNamespaceCreation: ref.SkipNamespaceCreation,
			Force:                 ref.Force,
		})
		if err := checkObjects(items); err != nil { // before more is decoded
			return composedItems{}, withReason(status.ReasonRender, err)
		}
	}
	return composedItems{items: items, builtInputs: builtInputs{contents: contents}}, nil
}

// readKustomization reads the files and the values of ref, and expands its templates. isSensitive is true if any of
// them is from a Secret.
func (c *Composer) readKustomization(ctx context.Context, r ComposeRequest, ref configv1beta1.KustomizationRef) (k render.Kustomization, isSensitive bool, err error) {
	content, err := c.Contents.Kustomization(ctx, ref, r.TemplateContext)
	if err != nil {
		return render.Kustomization{}, false, withReason(status.ReasonSource, err)
	}
	isSensitive = content.Sensitive
	var from []source.Content
	for _, values := range ref.ValuesFrom {
		content, err := c.Contents.Values(ctx, values, r.TemplateContext)
		if err != nil {
			return render.Kustomization{}, false, withReason(status.ReasonSource, err)
		}
		from = append(from, content)
		isSensitive = isSensitive || content.Sensitive
	}
	k, err = render.NewKustomization(content, ref, from, r.TemplateContext)
	return k, isSensitive, withReason(status.ReasonRender, err)
}
