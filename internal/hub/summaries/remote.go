package summaries

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	ctrlsource "sigs.k8s.io/controller-runtime/pkg/source"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/source"
)

// setReferences replaces the references of a summary, and the URLs that it uses with the intervals of their requests.
func (c *Controller) setReferences(ctx context.Context, summary types.NamespacedName, references []source.Reference, uses []source.RemoteUse) error {
	c.references.set(summary, references)
	if fetcher := c.remoteFetcher(); fetcher != nil {
		return fetcher.SetUses(ctx, summary.String(), uses)
	}
	return nil
}

// remoteFetcher returns the fetcher of URLs, nil in tests without one.
func (c *Controller) remoteFetcher() *source.RemoteFetcher {
	if c.Composer == nil || c.Composer.Contents == nil {
		return nil
	}
	return c.Composer.Contents.Remote
}

// changedURLSource returns the source that enqueues the summaries that refer to a URL with new content, or with another
// error.
func (c *Controller) changedURLSource() ctrlsource.TypedSource[reconcile.Request] {
	return ctrlsource.TypedChannel(c.remoteFetcher().Changes(), handler.TypedEnqueueRequestsFromMapFunc(
		func(_ context.Context, changed source.Reference) []reconcile.Request {
			return c.requestsReferring(changed)
		}))
}

// requestsReferring returns the requests for the summaries that refer to an object or a URL.
func (c *Controller) requestsReferring(reference source.Reference) []reconcile.Request {
	referring := c.references.summariesFor(reference)
	all := make([]reconcile.Request, 0, len(referring))
	for _, summary := range referring {
		all = append(all, reconcile.Request{NamespacedName: summary})
	}
	return all
}

// RemoteUses returns the URLs that the bundles are built from, with the intervals of their requests. It omits URLs that
// cannot be resolved: Compose returns their errors.
func (c *Composer) RemoteUses(r ComposeRequest) []source.RemoteUse {
	var all []source.RemoteUse
	for _, remote := range remoteSources(r) {
		if use, err := source.ResolveRemoteUse(remote, r.TemplateContext); err == nil {
			all = append(all, use)
		}
	}
	return all
}

func remoteSources(r ComposeRequest) []libv1beta1.RemoteSource {
	var all []libv1beta1.RemoteSource
	for _, ref := range r.Summary.Spec.ClusterProfileSpec.PolicyRefs {
		if ref.RemoteURL != nil {
			all = append(all, ref.RemoteURL.RemoteSource)
		}
	}
	for _, ref := range r.Summary.Spec.ClusterProfileSpec.KustomizationRefs {
		if ref.RemoteURL != nil {
			all = append(all, *ref.RemoteURL)
		}
	}
	return all
}

// loginReferences returns the Secrets with the logins for the URLs in references.
func loginReferences(references []source.Reference) []source.Reference {
	var all []source.Reference
	for _, reference := range references {
		if login, ok := reference.LoginSecret(); ok {
			all = append(all, login)
		}
	}
	return all
}

// urlInput returns a URL with the version of its content. Version is "" after an error, which Compose returns.
func (c *Composer) urlInput(ctx context.Context, reference source.Reference) InputObject {
	content, err := c.Contents.Remote.Read(ctx, reference)
	if err != nil {
		return InputObject{}
	}
	return InputObject{Reference: reference, Version: content.Version}
}
