package summaries

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/match"
	"github.com/towline/towline/internal/render"
	"github.com/towline/towline/internal/source"
)

// Unsupported lists what a summary asks for that is not acted on yet.
func Unsupported(spec configv1beta1.ProfileSpec, labels map[string]string) []string {
	fields := append(render.Unsupported(spec), render.UnsupportedLabels(labels)...)
	return append(fields, match.UnsupportedRefs(spec)...)
}

// request gathers what the bundles of a summary are made of.
func (c *Controller) request(ctx context.Context, s *state) (Request, error) {
	owner, err := ownerOf(s.summary)
	if err != nil {
		return Request{}, err
	}
	subject, err := subjectOf(s.cluster)
	if err != nil {
		return Request{}, err
	}
	audience, err := c.audience(ctx, s)
	if err != nil {
		return Request{}, err
	}
	return Request{Summary: s.summary, Member: s.member, Subject: subject, Owner: owner, Audience: audience}, nil
}

// subjectOf returns the cluster as templates see it, without what changes all the time.
func subjectOf(cluster *libv1beta1.SveltosCluster) (source.Subject, error) {
	seen := cluster.DeepCopy()
	seen.ManagedFields = nil
	seen.ResourceVersion = ""
	seen.Status.AgentLastReportTime = nil
	seen.TypeMeta = metav1.TypeMeta{APIVersion: libv1beta1.GroupVersion.String(), Kind: libv1beta1.SveltosClusterKind}
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(seen)
	if err != nil {
		return source.Subject{}, fmt.Errorf("convert cluster %s: %w", client.ObjectKeyFromObject(cluster), err)
	}
	return source.Subject{Cluster: fields, Namespace: cluster.Namespace, Name: cluster.Name}, nil
}

// audience counts the pull members that the summary's profile matches.
func (c *Controller) audience(ctx context.Context, s *state) (int, error) {
	matching, err := c.matching(ctx, s)
	if err != nil || len(matching) < 2 {
		return len(matching), err
	}
	// There may be many clusters, and they are only read.
	var clusters libv1beta1.SveltosClusterList
	if err := c.Hub.List(ctx, &clusters, client.UnsafeDisableDeepCopy); err != nil {
		return 0, fmt.Errorf("list clusters: %w", err)
	}
	pull := make(map[client.ObjectKey]bool, len(clusters.Items))
	for i := range clusters.Items {
		pull[client.ObjectKeyFromObject(&clusters.Items[i])] = clusters.Items[i].Spec.PullMode
	}
	count := 0
	for _, ref := range matching {
		if pull[client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}] {
			count++
		}
	}
	return count, nil
}

// matching lists the clusters that the summary's profile matches, by its status.
func (c *Controller) matching(ctx context.Context, s *state) ([]corev1.ObjectReference, error) {
	owner := metav1.GetControllerOf(s.summary)
	if owner == nil {
		return nil, nil
	}
	if owner.Kind == configv1beta1.ProfileKind {
		profile := &configv1beta1.Profile{}
		err := c.Hub.Get(ctx, client.ObjectKey{Namespace: s.summary.Namespace, Name: owner.Name}, profile)
		return profile.Status.MatchingClusters, client.IgnoreNotFound(err)
	}
	profile := &configv1beta1.ClusterProfile{}
	err := c.Hub.Get(ctx, client.ObjectKey{Name: owner.Name}, profile)
	return profile.Status.MatchingClusters, client.IgnoreNotFound(err)
}
