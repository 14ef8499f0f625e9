package match

import (
	"strconv"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// PullMembersAnnotation on a ClusterSummary has the number of pull members that matched its profile when the summary
// was last written. It may be outdated, since it decides only where content is stored.
const PullMembersAnnotation = "towline.dev/audience"

// CountPull returns the number of pull members in members.
func CountPull(members []fleet.Member) int {
	count := 0
	for _, m := range members {
		if m.Mode == fleet.Pull {
			count++
		}
	}
	return count
}

// PullMembers returns the value of PullMembersAnnotation, 0 if it is missing or invalid.
func PullMembers(summary *configv1beta1.ClusterSummary) int {
	count, err := strconv.Atoi(summary.Annotations[PullMembersAnnotation])
	if err != nil {
		return 0
	}
	return count
}
