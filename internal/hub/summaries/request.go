package summaries

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/fleet"
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
func request(s *state) (Request, error) {
	owner, err := ownerOf(s.summary)
	if err != nil {
		return Request{}, err
	}
	subject, err := SubjectFor(s.summary, s.cluster)
	if err != nil {
		return Request{}, err
	}
	made := Request{Summary: s.summary, Member: s.member, Subject: subject, Owner: owner, Audience: match.Audience(s.summary)}
	if deployed := s.deployed[libv1beta1.FeatureHelm]; !deployed.Removing {
		made.Deployed, made.State, made.Outdated = deployed.Releases, deployed.Report.State, deployed.Report.Outdated
	}
	return made, nil
}

// SubjectFor returns what the templates of a summary see of its cluster, and what they may read. It fails with
// phase.Invalid for a summary that belongs to no profile.
func SubjectFor(summary *configv1beta1.ClusterSummary, cluster client.Object) (source.Subject, error) {
	owner, err := ownerOf(summary)
	if err != nil {
		return source.Subject{}, err
	}
	subject, err := subjectOf(cluster)
	if err == nil && owner.Kind == configv1beta1.ProfileKind {
		// Who may write profiles in one namespace must not learn what is in another.
		subject.Confined = summary.Namespace
	}
	return subject, err
}

// subjectOf returns the cluster as templates see it, without what changes all the time.
func subjectOf(cluster client.Object) (source.Subject, error) {
	member := fleet.FromObject(cluster)
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(fleet.WithoutVolatileFields(cluster))
	if err != nil {
		return source.Subject{}, fmt.Errorf("convert cluster %s: %w", member.Key(), err)
	}
	return source.Subject{Cluster: fields, Namespace: member.Namespace, Name: member.Name}, nil
}
