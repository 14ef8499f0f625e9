package summaries

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// setupFlux adds the watches of Flux's sources to mgr. A changed artifact reconciles the summaries that refer to it.
func (c *Controller) setupFlux(mgr manager.Manager) error {
	c.Flux.IsReferenced = c.references.hasKind
	c.Flux.Changed = func(ref source.Reference) {
		for _, summary := range c.references.summariesFor(ref) {
			c.slots.Queue.Add(reconcile.Request{NamespacedName: summary})
		}
	}
	c.fluxObject = c.Flux.Get
	return mgr.Add(c.Flux)
}

// fluxInput returns a source with the version of its artifact. Version is "" if the source has no artifact.
// readsCluster is true if the files in the artifact are templates or scripts.
func (c *Controller) fluxInput(ctx context.Context, reference source.Reference) (input InputObject, readsCluster bool) {
	object, err := c.fluxObject(ctx, reference)
	if err != nil {
		return InputObject{}, false
	}
	artifact := source.ArtifactOf(object)
	if artifact.URL == "" {
		return InputObject{}, false
	}
	return InputObject{Reference: reference, UID: object.GetUID(), Version: artifact.Version()}, artifact.IsTemplate || artifact.IsLua
}

// fetchFluxChart returns the chart in a directory of a Flux source.
func (c *Composer) fetchFluxChart(ctx context.Context, r ComposeRequest, chart configv1beta1.HelmChart) (source.Chart, error) {
	if chart.RegistryCredentialsConfig != nil || chart.SignatureVerification != nil || chart.ProvenanceVerification != nil {
		return source.Chart{}, phase.TerminalErrorf("repositoryURL %s: registryCredentialsConfig, signatureVerification and provenanceVerification are not for charts from a source of Flux, which has a secretRef and a verification of its own", chart.RepositoryURL)
	}
	return c.Charts.Package(ctx, chart, c.Contents.Artifacts, r.TemplateContext)
}
