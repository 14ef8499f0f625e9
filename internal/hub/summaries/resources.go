package summaries

import (
	"context"
	"errors"

	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/hub/resources"
	"github.com/towline/towline/internal/source"
	"github.com/towline/towline/internal/status"
)

var errNoResources = errors.New("no reader for templateResourceRefs")

// WithResources returns tmplCtx with the objects of templateResourceRefs, which the templates of a summary can read. It
// does not watch them, so the reconcile of the summary uses loadResources. watcher may be nil for a summary without
// templateResourceRefs.
func WithResources(ctx context.Context, watcher *resources.Watcher, summary *configv1beta1.ClusterSummary, tmplCtx source.TemplateContext) (source.TemplateContext, error) {
	refs := summary.Spec.ClusterProfileSpec.TemplateResourceRefs
	if len(refs) == 0 {
		return tmplCtx, nil
	}
	if watcher == nil {
		return tmplCtx, errNoResources
	}
	var err error
	tmplCtx.Resources, err = watcher.Read(ctx, refs, tmplCtx)
	return tmplCtx, withReason(status.ReasonSource, err)
}

// loadResources is WithResources for the reconcile of the summary: it also watches the objects.
func (c *Controller) loadResources(ctx context.Context, summary *configv1beta1.ClusterSummary, tmplCtx source.TemplateContext) (source.TemplateContext, error) {
	refs := summary.Spec.ClusterProfileSpec.TemplateResourceRefs
	if c.Resources == nil && len(refs) > 0 {
		return tmplCtx, errNoResources
	}
	if c.Resources == nil {
		return tmplCtx, nil
	}
	var err error
	tmplCtx.Resources, err = c.Resources.Load(ctx, client.ObjectKeyFromObject(summary), refs, tmplCtx)
	return tmplCtx, withReason(status.ReasonSource, err)
}

// forgetReferences ends the watches of the objects that a summary refers to, and the requests to its URLs.
func (c *Controller) forgetReferences(ctx context.Context, summary client.ObjectKey) error {
	if c.Resources != nil {
		c.Resources.Forget(summary)
	}
	return c.setReferences(ctx, summary, nil, nil)
}

// markSensitive marks all items as sensitive if templates can read a Secret by templateResourceRefs: each object can
// have data of the Secret.
func markSensitive(items []bundle.Item, tmplCtx source.TemplateContext) {
	for i := range items {
		if tmplCtx.Resources.HasSecret {
			items[i].Sensitive, items[i].OnlySecretsPrivate = true, false
		}
	}
}
