package render

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"helm.sh/helm/v4/pkg/chart/common"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/phase"
)

// recordedCapabilities is .Capabilities for a chart that only calls .APIVersions.Has.
type recordedCapabilities struct {
	*common.Capabilities
	APIVersions recordedVersions // hides the field of Capabilities
}

// recordedVersions is .Capabilities.APIVersions. It records the names that templates pass to Has.
type recordedVersions struct {
	common.VersionSet
	checked map[string]bool
}

const (
	// maxCheckedAPIs is the maximum number of names that a chart can check. Large charts check some dozens. maxVariants
	// is the maximum number of cached renderings of a request that differ in their API versions.
	maxCheckedAPIs = 1000
	maxVariants    = 100
	// maxAPIName is the maximum length of a name in bytes. No API has a longer one.
	maxAPIName = 512
)

var errTooManyAPIs = phase.Invalidf("it checks more than %d API versions", maxCheckedAPIs)

// Has returns whether the member serves an API version, like Helm's method Has, and records the name. It fails after
// maxCheckedAPIs names.
func (v recordedVersions) Has(name string) (bool, error) {
	if len(name) > maxAPIName {
		return false, nil
	}
	if v.checked[name] = true; len(v.checked) > maxCheckedAPIs {
		return false, errTooManyAPIs
	}
	return v.VersionSet.Has(name), nil
}

// apiVariants are the renderings of requests that differ only in their API versions.
type apiVariants struct {
	mu       sync.Mutex // guards variants
	variants []apiVariant
}

// apiVariant is one rendering. Members can share it if they give the same answers for the API versions in checked.
type apiVariant struct {
	apiVersions []string // of the request that was rendered
	checked     []string
}

// find returns the API versions of a rendering that a member with the given API versions can share.
func (v *apiVariants) find(apiVersions []string) (found []string, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i := slices.IndexFunc(v.variants, func(known apiVariant) bool {
		return !slices.ContainsFunc(known.checked, func(name string) bool {
			return slices.Contains(apiVersions, name) != slices.Contains(known.apiVersions, name)
		})
	})
	if i < 0 {
		return nil, false
	}
	return v.variants[i].apiVersions, true
}

// add adds the rendering of a request, unless a concurrent caller has added one that the member can share.
func (v *apiVariants) add(apiVersions []string, checked map[string]bool) {
	if _, ok := v.find(apiVersions); ok {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.variants) == maxVariants { // the oldest one is rendered again if a member needs it
		v.variants = slices.Delete(v.variants, 0, 1)
	}
	v.variants = append(v.variants, apiVariant{apiVersions: apiVersions, checked: slices.Sorted(maps.Keys(checked))})
}

// renderForCheckedAPIs is renderShared for a chart that only calls .Capabilities.APIVersions.Has. Members share a
// rendering if all these calls return the same, even if the members serve different APIs otherwise.
func (c *Charts) renderForCheckedAPIs(ctx context.Context, request ChartRequest) (Release, error) {
	base := request
	base.APIVersions = nil
	baseKey, err := base.key()
	if err != nil {
		return Release{}, err
	}
	created := Release{apiVariants: &apiVariants{}}
	variants := c.sharedReleases.GetOrPut("API variants of "+baseKey, created, cache.MinSize).apiVariants
	known, ok := variants.find(request.APIVersions)
	if ok {
		request.APIVersions = known
	}
	key, err := request.key()
	if err != nil {
		return Release{}, err
	}
	request.checkedAPIs = map[string]bool{}
	release, err := c.renderShared(ctx, key, request)
	if err == nil && !ok {
		variants.add(request.APIVersions, release.checkedAPIs)
	}
	return release, err
}

// usesAPIs returns whether text reads fields of .Capabilities other than the Kubernetes and Helm versions.
func usesAPIs(text string) bool {
	return usesCapabilities(regexp.MustCompile(`Capabilities\.(KubeVersion|HelmVersion)`).ReplaceAllString(text, ""))
}

// listsAPIs returns whether text reads fields of .Capabilities other than the versions and .APIVersions.Has.
func listsAPIs(text string) bool {
	return usesAPIs(regexp.MustCompile(`Capabilities\.APIVersions\.Has\b`).ReplaceAllString(text, ""))
}

func usesCapabilities(text string) bool { return strings.Contains(text, "Capabilities") }
