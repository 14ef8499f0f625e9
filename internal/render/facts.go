package render

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// chartFacts describes a chart: which versions it supports, and which inputs its templates may read.
type chartFacts struct {
	name        string
	kubeVersion string // the supported versions of Kubernetes; "" for all
	// usesVersion and usesAPIs are true if a template may read the Kubernetes version, and the API versions, of the
	// member.
	usesVersion bool
	usesAPIs    bool
	// listsAPIs is true if a template may use the API versions in another way than with .Capabilities.APIVersions.Has.
	listsAPIs bool
	// usesRevision is true if a template may read .Release.Revision. usesOperation is true if a template may read
	// .Release.IsInstall or .Release.IsUpgrade.
	usesRevision  bool
	usesOperation bool
}

// maxFactsSize limits the cached facts of all charts in bytes.
const maxFactsSize = 4 << 20

// factsCache caches chartFacts by the digest of the archive.
type factsCache struct {
	loading  sync.Mutex // locked while a chart is loaded, which takes much memory
	byDigest *cache.Cache[chartFacts]
}

func newFactsCache() *factsCache { return &factsCache{byDigest: cache.New[chartFacts](maxFactsSize)} }

// get returns the facts of a chart. It fails with phase.TerminalError if the chart cannot be installed on any member.
func (t *factsCache) get(chart source.Chart) (chartFacts, error) {
	return t.byDigest.GetOrCompute(chart.Digest, func() (chartFacts, int, error) {
		t.loading.Lock()
		defer t.loading.Unlock()
		facts, err := loadFacts(chart)
		return facts, cache.MinSize + len(facts.name) + len(facts.kubeVersion), err
	})
}

func loadFacts(chart source.Chart) (chartFacts, error) {
	loaded, err := loadChart(chart)
	if err != nil {
		return chartFacts{}, err
	}
	facts, err := factsOf(loaded)
	if err != nil {
		return chartFacts{}, phase.TerminalError{Err: fmt.Errorf("chart %s %s: %w", chart.Name, chart.Version, err)}
	}
	return facts, nil
}

func factsOf(loaded *helmchart.Chart) (chartFacts, error) {
	if kind := loaded.Metadata.Type; kind != "" && kind != "application" {
		return chartFacts{}, fmt.Errorf("it is of type %s, which cannot be installed", kind)
	}
	included := map[string]bool{}
	for _, sub := range loaded.Dependencies() {
		included[sub.Name()] = true
	}
	for _, dependency := range loaded.Metadata.Dependencies {
		if !included[dependency.Name] {
			return chartFacts{}, fmt.Errorf("its archive lacks the subchart %s", dependency.Name)
		}
	}
	facts := chartFacts{name: loaded.Metadata.Name, kubeVersion: loaded.Metadata.KubeVersion}
	facts.scanFiles(loaded)
	return facts, nil
}

// scanFiles sets the uses… fields and listsAPIs from the text of all files of the chart and its subcharts, since
// templates can also evaluate default values and other files. After a false positive, members only share fewer
// renderings.
func (f *chartFacts) scanFiles(loaded *helmchart.Chart) {
	for _, file := range loaded.Raw {
		if strings.HasPrefix(file.Name, "crds/") || strings.HasSuffix(file.Name, ".md") {
			continue
		}
		f.usesAPIs = f.usesAPIs || usesAPIs(string(file.Data))
		f.listsAPIs = f.listsAPIs || listsAPIs(string(file.Data))
		f.usesVersion = f.usesVersion || usesCapabilities(string(file.Data))
		f.usesRevision = f.usesRevision || usesRevision(string(file.Data))
		f.usesOperation = f.usesOperation || usesOperation(string(file.Data))
	}
	for _, sub := range loaded.Dependencies() {
		f.scanFiles(sub)
	}
}

// wholeRelease matches .Release without a field, as in "toYaml .Release".
const wholeRelease = `\.Release[^.\w]`

// usesRevision returns whether a template in text may read .Release.Revision.
func usesRevision(text string) bool { return matchesAction(text, `\bRevision\b|`+wholeRelease) }

// usesOperation returns whether a template in text may read .Release.IsInstall or .Release.IsUpgrade.
func usesOperation(text string) bool {
	return matchesAction(text, `\bIs(Install|Upgrade)\b|`+wholeRelease)
}

// matchesAction returns whether expression matches in a template action ({{ }}) in text.
func matchesAction(text, expression string) bool {
	if !strings.Contains(text, "{{") {
		return false
	}
	pattern := regexp.MustCompile(expression)
	return slices.ContainsFunc(regexp.MustCompile(`(?s)\{\{.*?\}\}`).FindAllString(text, -1), pattern.MatchString)
}

// usesReleaseFields returns whether the chart or the values of request may read the revision, and the operation.
func (f chartFacts) usesReleaseFields(request ChartRequest) (revision, operation bool) {
	return f.usesRevision || containsText(request.Values, usesRevision), f.usesOperation || containsText(request.Values, usesOperation)
}

// normalizeRequest removes the inputs that the chart does not read from request, so that requests with the same result
// are equal. It fails with phase.TerminalError if the chart does not support the member's version.
func (f chartFacts) normalizeRequest(request ChartRequest) (ChartRequest, error) {
	if request.KubeVersion == "" {
		return ChartRequest{}, fmt.Errorf("render chart %s: the Kubernetes version of the cluster is not known yet", f.name)
	}
	if f.kubeVersion != "" && !chartutil.IsCompatibleRange(f.kubeVersion, request.KubeVersion) {
		return ChartRequest{}, phase.TerminalErrorf("chart %s %s is for Kubernetes %s, but the cluster has %s",
			request.Chart.Name, request.Chart.Version, f.kubeVersion, request.KubeVersion)
	}
	valuesUseCapabilities := containsText(request.Values, usesCapabilities)
	switch {
	case !f.usesAPIs && !valuesUseCapabilities:
		request.APIVersions = nil
	case len(request.APIVersions) == 0:
		// Without the list, the chart would omit objects of optional APIs, and the engine would prune them.
		return ChartRequest{}, fmt.Errorf("render chart %s: the APIs that the cluster serves are not known yet", f.name)
	default:
		request.onlyChecksAPIs = !f.listsAPIs && !containsText(request.Values, listsAPIs)
	}
	if !f.usesVersion && !valuesUseCapabilities {
		request.KubeVersion = "v1.0.0" // any valid version: the chart does not read it
	}
	revision, operation := f.usesReleaseFields(request)
	if !revision {
		request.Revision = 0
	}
	request.IsUpgrade = request.IsUpgrade && operation
	return request, nil
}

// containsText returns whether matches returns true for a string in value. A chart can evaluate any string as a
// template.
func containsText(value any, matches func(string) bool) bool {
	switch value := value.(type) {
	case string:
		return matches(value)
	case map[string]any:
		for _, nested := range value {
			if containsText(nested, matches) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(value, func(nested any) bool { return containsText(nested, matches) })
	}
	return false
}
