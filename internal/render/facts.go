package render

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// chartFacts are what is known of a chart before it is rendered.
type chartFacts struct {
	name        string
	kubeVersion string // the versions of Kubernetes it is for; "" for all
	// seesVersion and seesAPIs say that its templates look at the member's version and API list.
	seesVersion bool
	seesAPIs    bool
	// seesRevision and seesOperation say that its templates may look at the revision, and at whether it is an upgrade.
	seesRevision  bool
	seesOperation bool
}

// factsByDigest finds the facts of every archive once.
type factsByDigest struct {
	mu    sync.Mutex // guards known
	known map[string]chartFacts
}

func newFactsByDigest() *factsByDigest { return &factsByDigest{known: map[string]chartFacts{}} }

// of returns the facts of a chart, or phase.Invalid for one that cannot be installed anywhere.
func (t *factsByDigest) of(wanted source.Chart) (chartFacts, error) {
	t.mu.Lock()
	found, ok := t.known[wanted.Digest]
	t.mu.Unlock()
	if ok {
		return found, nil
	}
	loaded, err := load(wanted)
	if err != nil {
		return chartFacts{}, err
	}
	found, err = factsOf(loaded)
	if err != nil {
		return chartFacts{}, phase.Invalid{Err: fmt.Errorf("chart %s %s: %w", wanted.Name, wanted.Version, err)}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known[wanted.Digest] = found
	return found, nil
}

func factsOf(loaded *helmchart.Chart) (chartFacts, error) {
	if kind := loaded.Metadata.Type; kind != "" && kind != "application" {
		return chartFacts{}, fmt.Errorf("it is of type %s, which cannot be installed", kind)
	}
	packed := map[string]bool{}
	for _, sub := range loaded.Dependencies() {
		packed[sub.Name()] = true
	}
	for _, dependency := range loaded.Metadata.Dependencies {
		if !packed[dependency.Name] {
			return chartFacts{}, fmt.Errorf("its archive lacks the subchart %s", dependency.Name)
		}
	}
	found := chartFacts{name: loaded.Metadata.Name, kubeVersion: loaded.Metadata.KubeVersion}
	found.read(loaded)
	return found, nil
}

// read looks at the text of all templates, and of default values and other files, since they may be templates too. It rather sees
// too much: that costs no more than a rendering that could have been shared.
func (f *chartFacts) read(loaded *helmchart.Chart) {
	for _, file := range loaded.Raw {
		if strings.HasPrefix(file.Name, "crds/") || strings.HasSuffix(file.Name, ".md") {
			continue
		}
		f.seesAPIs = f.seesAPIs || seesAPIs(string(file.Data))
		f.seesVersion = f.seesVersion || seesCapabilities(string(file.Data))
		f.seesRevision = f.seesRevision || seesRevision(string(file.Data))
		f.seesOperation = f.seesOperation || seesOperation(string(file.Data))
	}
	for _, sub := range loaded.Dependencies() {
		f.read(sub)
	}
}

// seesAPIs says whether text looks at more of the capabilities than the version.
func seesAPIs(text string) bool {
	rest := regexp.MustCompile(`Capabilities\.(KubeVersion|HelmVersion)`).ReplaceAllString(text, "")
	return seesCapabilities(rest)
}

// seesRevision returns whether a template in text may look at the revision of the release.
func seesRevision(text string) bool { return inAction(text, `\bRevision\b`) }

// seesOperation returns whether a template in text may look at whether the release is installed or upgraded.
func seesOperation(text string) bool { return inAction(text, `\bIs(Install|Upgrade)\b`) }

// inAction returns whether expression matches in an action of a template in text.
func inAction(text, expression string) bool {
	if !strings.Contains(text, "{{") {
		return false
	}
	wanted := regexp.MustCompile(expression)
	return slices.ContainsFunc(regexp.MustCompile(`(?s)\{\{.*?\}\}`).FindAllString(text, -1), wanted.MatchString)
}

// sees returns whether the chart or the values of request may look at the revision, and at the operation.
func (f chartFacts) sees(request ChartRequest) (revision, operation bool) {
	return f.seesRevision || anyText(request.Values, seesRevision), f.seesOperation || anyText(request.Values, seesOperation)
}

// narrow returns request without what the chart cannot see, so that requests with the same result are the same. It fails with
// phase.Invalid if the chart is not for the member's version.
func (f chartFacts) narrow(request ChartRequest) (ChartRequest, error) {
	if request.KubeVersion == "" {
		return ChartRequest{}, fmt.Errorf("render chart %s: the Kubernetes version of the cluster is not known yet", f.name)
	}
	if f.kubeVersion != "" && !chartutil.IsCompatibleRange(f.kubeVersion, request.KubeVersion) {
		return ChartRequest{}, phase.Invalidf("chart %s %s is for Kubernetes %s, but the cluster has %s",
			request.Chart.Name, request.Chart.Version, f.kubeVersion, request.KubeVersion)
	}
	values := anyText(request.Values, seesCapabilities)
	switch {
	case !f.seesAPIs && !values:
		request.APIVersions = nil
	case len(request.APIVersions) == 0:
		// Without the list, objects for the APIs of others would be left out, and pruned.
		return ChartRequest{}, fmt.Errorf("render chart %s: the APIs that the cluster serves are not known yet", f.name)
	}
	if !f.seesVersion && !values {
		request.KubeVersion = "v1.0.0" // any: nothing looks at it
	}
	revision, operation := f.sees(request)
	if !revision {
		request.Revision = 0
	}
	request.IsUpgrade = request.IsUpgrade && operation
	return request, nil
}

// anyText says whether is holds for any text in value, which charts may use as a template.
func anyText(value any, is func(string) bool) bool {
	switch value := value.(type) {
	case string:
		return is(value)
	case map[string]any:
		for _, nested := range value {
			if anyText(nested, is) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(value, func(nested any) bool { return anyText(nested, is) })
	}
	return false
}

func seesCapabilities(text string) bool { return strings.Contains(text, "Capabilities") }
