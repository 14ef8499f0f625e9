package summaries

import (
	"errors"
	"net"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/hub/slots"
)

const (
	// pullWorkers is the number of concurrent reconciles for pull members, and pullProfileWorkers the maximum for one
	// profile. These reconciles wait only for the hub's API server and for renderings.
	pullWorkers        = 30
	pullProfileWorkers = 20
	// pullClusterWorkers is the maximum for one pull member, so that reports of a few agents cannot occupy all workers.
	pullClusterWorkers = 10
	// pushWorkers is the number of concurrent reconciles for push members. These reconciles wait for the members, too.
	// When pushSharedWorkers are in use, the other workers serve only clusters without a running reconcile.
	pushWorkers        = 100
	pushSharedWorkers  = 50
	pushClusterWorkers = 10
	pushProfileWorkers = 80
	// slowPullWorkers and slowPushWorkers are the maximum of concurrent reconciles for all slow clusters and profiles.
	slowPullWorkers = 10
	slowPushWorkers = 30
	// The clusters of one namespace, which belong to one tenant, occupy at most four fifths of the workers, and four
	// fifths of the workers for slow clusters and profiles. When so many workers are in use, the other workers serve only
	// namespaces without a running reconcile. In a fleet with one namespace they are idle.
	pullNamespaceWorkers     = 24
	pushNamespaceWorkers     = 80
	slowPullNamespaceWorkers = 8
	slowPushNamespaceWorkers = 24
)

// workersFor returns the slots that a summary's reconcile needs: its pool of workers, and a key each for its cluster,
// profile and namespace. A key limits the workers that, for example, one cluster occupies. See slots.Key for the
// fields.
func workersFor(summary *configv1beta1.ClusterSummary, m fleet.Member) (slots.Pool, []slots.Key) {
	if m.Mode != fleet.Push {
		return slots.Pool{Name: string(fleet.Pull), Workers: pullWorkers, Slow: slowPullWorkers},
			[]slots.Key{
				{Name: clusterKey(m), Max: pullClusterWorkers, Shared: pullProfileWorkers},
				{Name: profileKey(summary), Max: pullProfileWorkers, Shared: pullProfileWorkers},
				{Name: namespaceKey(m), Max: pullNamespaceWorkers, Shared: pullNamespaceWorkers, Slow: slowPullNamespaceWorkers},
			}
	}
	return slots.Pool{Name: string(fleet.Push), Workers: pushWorkers, Slow: slowPushWorkers}, []slots.Key{
		{Name: clusterKey(m), Max: pushClusterWorkers, Shared: pushSharedWorkers},
		{Name: profileKey(summary), Max: pushProfileWorkers, Shared: pushWorkers},
		{Name: namespaceKey(m), Max: pushNamespaceWorkers, Shared: pushNamespaceWorkers, Slow: slowPushNamespaceWorkers},
	}
}

// slowKeys returns the keys of workersFor that were slow in this reconcile.
func slowKeys(s *state, m fleet.Member) []string {
	var keys []string
	if s.isClusterSlow {
		keys = append(keys, clusterKey(m))
	}
	if s.isProfileSlow {
		keys = append(keys, profileKey(s.summary))
	}
	return keys
}

func clusterKey(m fleet.Member) string { return "cluster " + m.ID().String() }

// namespaceKey returns the key of the namespace of a cluster. Each Cluster has a namespace of its own.
func namespaceKey(m fleet.Member) string { return "namespace " + m.Namespace }

// profileKey returns the key of the profile of a summary, or of the summary itself if it has no profile.
func profileKey(summary *configv1beta1.ClusterSummary) string {
	owner := ProfileOf(summary)
	if owner == nil {
		return "summary " + summary.Namespace + "/" + summary.Name
	}
	if owner.Kind == configv1beta1.ProfileKind {
		return "profile " + summary.Namespace + "/" + owner.Name
	}
	return "profile " + owner.Name
}

// isTimeout returns whether a request to a member has timed out. It is also true after reconcileTimeout, but not for a
// canceled context.
func isTimeout(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}
