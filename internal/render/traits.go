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

// traits are what is known of a chart before it is rendered.
type traits struct {
	name        string
	kubeVersion string // the versions of Kubernetes it is for; "" for all
	// seesVersion and seesAPIs say that its templates look at the member's version and API list.
	seesVersion bool
	seesAPIs    bool
	// restless says that its templates call what differs from one time to the next.
	restless bool
}

// traitsByDigest finds the traits of every archive once.
type traitsByDigest struct {
	mu    sync.Mutex // guards known
	known map[string]traits
}

func newTraitsByDigest() *traitsByDigest { return &traitsByDigest{known: map[string]traits{}} }

// of returns the traits of a chart, or phase.Invalid for one that cannot be installed anywhere.
func (t *traitsByDigest) of(wanted source.Chart) (traits, error) {
	t.mu.Lock()
	found, ok := t.known[wanted.Digest]
	t.mu.Unlock()
	if ok {
		return found, nil
	}
	loaded, err := load(wanted)
	if err != nil {
		return traits{}, err
	}
	found, err = traitsOf(loaded)
	if err != nil {
		return traits{}, phase.Invalid{Err: fmt.Errorf("chart %s %s: %w", wanted.Name, wanted.Version, err)}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.known[wanted.Digest] = found
	return found, nil
}

func traitsOf(loaded *helmchart.Chart) (traits, error) {
	if kind := loaded.Metadata.Type; kind != "" && kind != "application" {
		return traits{}, fmt.Errorf("it is of type %s, which cannot be installed", kind)
	}
	packed := map[string]bool{}
	for _, sub := range loaded.Dependencies() {
		packed[sub.Name()] = true
	}
	for _, dependency := range loaded.Metadata.Dependencies {
		if !packed[dependency.Name] {
			return traits{}, fmt.Errorf("its archive lacks the subchart %s", dependency.Name)
		}
	}
	found := traits{name: loaded.Metadata.Name, kubeVersion: loaded.Metadata.KubeVersion}
	found.read(loaded)
	return found, nil
}

// read looks at the text of all templates, and of default values and other files, since they may be templates too. It rather sees
// too much: that costs no more than a rendering that could have been shared.
func (t *traits) read(loaded *helmchart.Chart) {
	for _, file := range loaded.Raw {
		if strings.HasPrefix(file.Name, "crds/") || strings.HasSuffix(file.Name, ".md") {
			continue
		}
		t.seesAPIs = t.seesAPIs || seesAPIs(string(file.Data))
		t.seesVersion = t.seesVersion || seesCapabilities(string(file.Data))
		t.restless = t.restless || isRestless(string(file.Data))
	}
	for _, sub := range loaded.Dependencies() {
		t.read(sub)
	}
}

// seesAPIs says whether text looks at more of the capabilities than the version.
func seesAPIs(text string) bool {
	rest := regexp.MustCompile(`Capabilities\.(KubeVersion|HelmVersion)`).ReplaceAllString(text, "")
	return seesCapabilities(rest)
}

// isRestless says whether a template in text calls chance or the clock.
func isRestless(text string) bool {
	calls := regexp.MustCompile(`\b(now|ago|rand[A-Z]\w*|uuidv4|shuffle|gen(CA|Self|Signed|Private)\w*|htpasswd|bcrypt|encryptAES|date\w*|htmlDate\w*)\b`)
	for _, action := range regexp.MustCompile(`(?s)\{\{.*?\}\}`).FindAllString(text, -1) {
		if calls.MatchString(action) {
			return true
		}
	}
	return false
}

// narrow returns request without what the chart cannot see, so that requests with the same result are the same. It fails with
// phase.Invalid if the chart is not for the member's version.
func (t traits) narrow(request ChartRequest) (ChartRequest, error) {
	if request.KubeVersion == "" {
		return ChartRequest{}, fmt.Errorf("render chart %s: the Kubernetes version of the cluster is not known yet", t.name)
	}
	if t.kubeVersion != "" && !chartutil.IsCompatibleRange(t.kubeVersion, request.KubeVersion) {
		return ChartRequest{}, phase.Invalidf("chart %s %s is for Kubernetes %s, but the cluster has %s",
			request.Chart.Name, request.Chart.Version, t.kubeVersion, request.KubeVersion)
	}
	values := anyText(request.Values, seesCapabilities)
	switch {
	case !t.seesAPIs && !values:
		request.APIVersions = nil
	case len(request.APIVersions) == 0:
		// Without the list, objects for the APIs of others would be left out, and pruned.
		return ChartRequest{}, fmt.Errorf("render chart %s: the APIs that the cluster serves are not known yet", t.name)
	}
	if !t.seesVersion && !values {
		request.KubeVersion = "v1.0.0" // any: nothing looks at it
	}
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
