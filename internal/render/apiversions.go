package render

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

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
	// rendering is a semaphore: while one request is rendered, the others wait for its variant.
	rendering chan struct{}
	variants  []apiVariant // guarded by rendering
}

// apiVariant is one rendering. It holds for all members that serve the same ones of the API versions in asked.
type apiVariant struct {
	apiVersions []string // of the request that was rendered
	asked       []string
}

// lock waits until no other request is rendered, or until ctx ends.
func (v *apiVariants) lock(ctx context.Context) (unlock func(), err error) {
	select {
	case v.rendering <- struct{}{}:
		return func() { <-v.rendering }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// find returns the API versions of a rendering that holds for a member with the given ones.
func (v *apiVariants) find(apiVersions []string) (found []string, ok bool) {
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

// renderForAnswers is renderForAll for a chart that only calls .Capabilities.APIVersions.Has: members for which all
// calls return the same share a rendering, also if they serve other APIs otherwise.
func (c *Charts) renderForAnswers(ctx context.Context, request ChartRequest) (Release, error) {
	base := request
	base.APIVersions = nil
	baseKey, err := base.key()
	if err != nil {
		return Release{}, err
	}
	created := Release{size: minSize, apiVariants: &apiVariants{rendering: make(chan struct{}, 1)}}
	variants := c.shared.getOrPut("API variants of "+baseKey, created).apiVariants
	unlock, err := variants.lock(ctx)
	if err != nil {
		return Release{}, fmt.Errorf("render chart %s: %w", request.Chart.Name, err)
	}
	defer unlock()
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
		variants.variants = append(variants.variants, apiVariant{
			apiVersions: request.APIVersions, asked: slices.Sorted(maps.Keys(release.asked)),
		})
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
