package render

import (
	"context"
	"regexp"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/phase"
)

// recordingCapabilities is .Capabilities for a chart that only calls .APIVersions.Has.
type recordingCapabilities struct {
	*common.Capabilities
	APIVersions recordingVersionSet // hides the field of Capabilities
}

// recordingVersionSet is .Capabilities.APIVersions. It records the arguments of Has.
type recordingVersionSet struct {
	common.VersionSet
	checked checkedAPIs
}

const (
	// A chart can check at most maxCheckedAPIs names of at most maxCheckedBytes bytes in total. Large charts check some
	// dozens. maxVariants limits the cached renderings of requests that differ only in their API versions.
	maxCheckedAPIs  = 1000
	maxCheckedBytes = 64 << 10
	maxVariants     = 100
)

var errTooManyAPIs = phase.TerminalErrorf("it checks more than %d API versions, or %d KiB of their names", maxCheckedAPIs, maxCheckedBytes>>10)

// Has returns whether the member serves an API version, like Helm's method Has, and records the name.
func (v recordingVersionSet) Has(name string) (bool, error) {
	v.checked[name] = true
	return v.VersionSet.Has(name), v.checked.checkLimits()
}

// checkedAPIs is the set of the arguments of Has in one rendering.
type checkedAPIs map[string]bool

// checkLimits returns an error if there are too many names.
func (c checkedAPIs) checkLimits() error {
	if len(c) > maxCheckedAPIs || c.bytes() > maxCheckedBytes {
		return errTooManyAPIs
	}
	return nil
}

// bytes returns the number of bytes of the names.
func (c checkedAPIs) bytes() (n int) {
	for name := range c {
		n += len(name)
	}
	return n
}

// size returns the memory in bytes: besides its name, an entry takes 40 bytes here and 40 bytes in apiVariant.served.
func (c checkedAPIs) size() int { return c.bytes() + 80*len(c) }

// apiVariants lists the cached renderings of requests that differ only in their API versions. It is immutable.
type apiVariants []apiVariant

// apiVariant is one rendering. A member can use it if the checked names that it serves are the names in served.
type apiVariant struct {
	key     string // of the rendering
	checked checkedAPIs
	served  sets.Set[string] // a subset of checked
}

// find returns the key of a rendering for members that serve these API versions.
func (v apiVariants) find(apiVersions []string) (key string, ok bool) {
	all := sets.New(apiVersions...)
	for _, known := range v {
		if known.checked.servedOf(all).Equal(known.served) {
			return known.key, true
		}
	}
	return "", false
}

// servedOf returns the names in c that are in all.
func (c checkedAPIs) servedOf(all sets.Set[string]) sets.Set[string] {
	served := sets.Set[string]{}
	for name := range c {
		if all.Has(name) {
			served.Insert(name)
		}
	}
	return served
}

// with returns a copy of v with added, without the oldest rendering if there are too many. That one is rendered again
// if a member needs it.
func (v apiVariants) with(added apiVariant) apiVariants {
	return append(slices.Clone(v[max(0, len(v)+1-maxVariants):]), added)
}

// size returns the memory of v in bytes.
func (v apiVariants) size() int {
	size := cache.MinSize
	for _, variant := range v {
		size += cache.MinSize + variant.checked.size()
	}
	return size
}

// renderForCheckedAPIs is renderShared for a chart that only calls .Capabilities.APIVersions.Has. Members share a
// rendering if all these calls have the same results, even if the members serve different APIs otherwise.
func (c *Charts) renderForCheckedAPIs(ctx context.Context, request ChartRequest) (Release, error) {
	base := request
	base.APIVersions = nil
	baseKey, err := base.key()
	if err != nil {
		return Release{}, err
	}
	variantsKey := "API variants of " + baseKey
	variantsEntry, _ := c.sharedReleases.Get(variantsKey)
	key, isKnown := variantsEntry.apiVariants.find(request.APIVersions)
	if !isKnown {
		if key, err = request.key(); err != nil {
			return Release{}, err
		}
	}
	request.checkedAPIs = checkedAPIs{}
	release, err := c.renderShared(ctx, key, request)
	if err == nil && !isKnown {
		c.addVariant(variantsKey, apiVariant{key: key, checked: release.checkedAPIs}, request.APIVersions)
	}
	return release, err
}

// addVariant adds a rendering to the variants in the cache entry of key, unless a concurrent caller has added one for
// the same API versions.
func (c *Charts) addVariant(key string, added apiVariant, apiVersions []string) {
	c.variantsMu.Lock()
	defer c.variantsMu.Unlock()
	entry, _ := c.sharedReleases.Get(key)
	if _, ok := entry.apiVariants.find(apiVersions); ok {
		return
	}
	added.served = added.checked.servedOf(sets.New(apiVersions...))
	entry.apiVariants = entry.apiVariants.with(added)
	c.sharedReleases.Put(key, entry, entry.apiVariants.size())
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
