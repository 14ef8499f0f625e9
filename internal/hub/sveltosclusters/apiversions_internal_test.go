package sveltosclusters

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/fleet"
	"github.com/towline/towline/internal/kube"
)

// TestKeepAPIVersions has a member with an aggregated API that does not answer, and lists of its APIs in succession.
func TestKeepAPIVersions(t *testing.T) {
	t.Parallel()
	many := make([]string, kube.MaxAPIs)
	for i := range many {
		many[i] = "many/v" + strconv.Itoa(i)
	}
	long := "long/v" + strings.Repeat("1", kube.MaxAPIText)
	incomplete := func(apis ...string) fleet.Facts { return fleet.Facts{APIVersions: apis} }
	complete := func(apis ...string) fleet.Facts { return fleet.Facts{APIVersions: apis, Complete: true} }
	for name, test := range map[string]struct {
		// status says when the status loses its list: "lost" before each list, "lost later" before the third one.
		status string
		lists  []fleet.Facts
		want   []string
	}{
		"the first list is incomplete":  {"", []fleet.Facts{incomplete("v1")}, []string{"v1"}},
		"an API does not answer":        {"", []fleet.Facts{complete("metrics/v1", "v1"), incomplete("v1")}, []string{"metrics/v1", "v1"}},
		"an API is added meanwhile":     {"", []fleet.Facts{incomplete("v1"), incomplete("new/v1", "v1")}, []string{"new/v1", "v1"}},
		"the status is lost":            {"lost", []fleet.Facts{complete("metrics/v1", "v1"), incomplete("v1"), incomplete("v1")}, []string{"v1"}},
		"the status is lost later":      {"lost later", []fleet.Facts{complete("metrics/v1", "v1"), incomplete("v1"), incomplete("v1")}, []string{"metrics/v1", "v1"}},
		"an API is removed":             {"", []fleet.Facts{incomplete("metrics/v1", "v1"), complete("v1")}, []string{"v1"}},
		"more APIs than a status holds": {"", []fleet.Facts{complete(many...), incomplete("v1")}, []string{"v1"}},
		"more text than a status holds": {"", []fleet.Facts{complete(long), incomplete("v1")}, []string{"v1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, status := &Controller{}, []string(nil)
			for i, facts := range test.lists {
				if test.status == "lost" || test.status == "lost later" && i > 1 {
					status = nil
				}
				status = c.keepAPIVersions(types.NamespacedName{Name: "one"}, status, facts).APIVersions
			}
			if !slices.Equal(status, test.want) {
				t.Errorf("got %d APIs: %.10v, want %v", len(status), status, test.want)
			}
		})
	}
}
