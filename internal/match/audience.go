package match

import (
	"strconv"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// AudienceAnnotation on a ClusterSummary tells how many pull members got the same from its profile when the summary was last written.
// It decides only where content is stored, so that it may be out of date.
const AudienceAnnotation = "towline.dev/audience"

// Pulling counts the pull members among members.
func Pulling(members []fleet.Member) int {
	count := 0
	for _, m := range members {
		if m.Mode == fleet.Pull {
			count++
		}
	}
	return count
}

// Audience reads AudienceAnnotation; 0 if it says nothing.
func Audience(summary *configv1beta1.ClusterSummary) int {
	count, err := strconv.Atoi(summary.Annotations[AudienceAnnotation])
	if err != nil {
		return 0
	}
	return count
}
