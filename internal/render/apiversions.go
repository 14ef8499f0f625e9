package render

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"helm.sh/helm/v4/pkg/chart/common"
)

// recordedCapabilities is .Capabilities for a chart that only calls .APIVersions.Has.
type recordedCapabilities struct {
	*common.Capabilities
	APIVersions recordedVersions // hides the field of Capabilities
}

// recordedVersions is .Capabilities.APIVersions with a record of the names that templates pass to Has.
type recordedVersions struct {
	common.VersionSet
	asked map[string]bool
}

// Has returns whether the member serves an API version, as Helm's method of that name does.
func (v recordedVersions) Has(name string) bool {
	v.asked[name] = true
	return v.VersionSet.Has(name)
}

// apiVariants are the renderings of requests that differ only in their API versions.
type apiVariants struct {
	mu       sync.Mutex // guards variants
	variants []apiVariant
}

// apiVariant is one rendering. It holds for all members that serve the same ones of the API versions in asked.
type apiVariant struct {
	apiVersions []string // of the request that was rendered
	asked       []string
}

// find returns the API versions of a rendering that holds for a member with the given ones.
func (v *apiVariants) find(apiVersions []string) (found []string, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	i := slices.IndexFunc(v.variants, func(known apiVariant) bool {
		return !slices.ContainsFunc(known.asked, func(name string) bool {
			return slices.Contains(apiVersions, name) != slices.Contains(known.apiVersions, name)
		})
	})
	if i < 0 {
		return nil, false
	}
	return v.variants[i].apiVersions, true
}

// add adds the rendering of a request, unless another one that holds for its member was added meanwhile.
func (v *apiVariants) add(apiVersions []string, asked map[string]bool) {
	if _, ok := v.find(apiVersions); ok {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.variants = append(v.variants, apiVariant{apiVersions: apiVersions, asked: slices.Sorted(maps.Keys(asked))})
}

// renderForAnswers is renderOnce for a chart that only calls .Capabilities.APIVersions.Has: members for which all calls
// return the same share a rendering, also if they serve other APIs otherwise.
func (c *Charts) renderForAnswers(ctx context.Context, request ChartRequest) (Release, error) {
	base := request
	base.APIVersions = nil
	baseKey, err := base.key()
	if err != nil {
		return Release{}, err
	}
	created := Release{size: minSize, apiVariants: &apiVariants{}}
	variants := c.shared.getOrPut("API variants of "+baseKey, created).apiVariants
	known, ok := variants.find(request.APIVersions)
	if ok {
		request.APIVersions = known
	}
	key, err := request.key()
	if err != nil {
		return Release{}, err
	}
	request.asked = map[string]bool{}
	release, err := c.renderOnce(ctx, key, request)
	if err == nil && !ok {
		variants.add(request.APIVersions, release.asked)
	}
	return release, err
}

// usesAPIs returns whether text reads .Capabilities other than the version.
func usesAPIs(text string) bool {
	return usesCapabilities(regexp.MustCompile(`Capabilities\.(KubeVersion|HelmVersion)`).ReplaceAllString(text, ""))
}

// listsAPIs returns whether text reads .Capabilities other than the version and the results of .APIVersions.Has.
func listsAPIs(text string) bool {
	return usesAPIs(regexp.MustCompile(`Capabilities\.APIVersions\.Has\b`).ReplaceAllString(text, ""))
}

func usesCapabilities(text string) bool { return strings.Contains(text, "Capabilities") }
