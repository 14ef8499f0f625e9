package render

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sync/singleflight"
	"helm.sh/helm/v4/pkg/chart/common"
	chartvalues "helm.sh/helm/v4/pkg/chart/common/util"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// maxRendering is how many bytes one chart may be rendered to. A hub must live through any chart.
const maxRendering = 256 << 20

// ChartRequest is everything that a rendering depends on.
type ChartRequest struct {
	Chart source.Chart
	// Values as merged by Values; the chart's own are added below them.
	Values    map[string]any
	Name      string // of the release
	Namespace string // of the release
	// KubeVersion and APIVersions ("group/version" and "group/version/Kind") are the member's. The version must be
	// known, and the list if the chart looks at it.
	KubeVersion string
	APIVersions []string
	// SkipCRDs leaves the CRDs in the chart's crds directories out.
	SkipCRDs bool
	// SkipSchemaValidation accepts values that the chart's schema does not.
	SkipSchemaValidation bool
	// DisableHooks leaves hooks out; without it a chart that has any is refused, as Towline does not run them yet.
	DisableHooks bool
}

// Charts renders charts the way a first installation with Helm does, but without a cluster: lookup finds nothing, the network is not
// asked and notes are dropped.
//
// An identical rendering is done once, whoever asks: requests that differ only in what the chart cannot see (it is known which charts
// look at the version or the API list) share one result. That is more than thrift. Some charts render differently every time, because
// they call randAlphaNum, genCA or now; members that share a rendering get the same, and it stays the same as long as Charts remembers
// it: in memory up to a size, and in a directory for those charts (see NewCharts).
type Charts struct {
	flights singleflight.Group
	memory  *memory
	disk    disk
	traits  *traitsByDigest
}

// NewCharts returns Charts that keeps the renderings of charts that call chance or the clock in dir, so that a restart does not roll
// new passwords out. They may hold secrets: dir is made for its owner only.
func NewCharts(dir string) (*Charts, error) {
	kept, err := newDisk(dir)
	if err != nil {
		return nil, err
	}
	return &Charts{memory: newMemory(maxRemembered), disk: kept, traits: newTraitsByDigest()}, nil
}

// Render returns the objects of a release: CRDs first, then template by template in the order of their paths. They are shared with
// others and must not be changed. Errors name the chart and the template or value; all but those of ctx and of reading the archive
// are phase.Invalid.
//
// Go cannot stop a template that runs: when ctx ends Render returns, and the work ends whenever it does.
func (c *Charts) Render(ctx context.Context, request ChartRequest) ([]*unstructured.Unstructured, error) {
	traits, err := c.traits.of(request.Chart)
	if err != nil {
		return nil, err
	}
	request, err = traits.narrow(request)
	if err != nil {
		return nil, err
	}
	key, err := request.key()
	if err != nil {
		return nil, err
	}
	if known, ok := c.memory.get(key); ok {
		return known, nil
	}
	flight := c.flights.DoChan(key, func() (any, error) { return c.render(key, request, traits) })
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("render chart %s: %w", request.Chart.Name, ctx.Err())
	case done := <-flight:
		if done.Err != nil {
			return nil, done.Err
		}
		return done.Val.([]*unstructured.Unstructured), nil
	}
}

func (c *Charts) render(key string, request ChartRequest, traits traits) ([]*unstructured.Unstructured, error) {
	if known, ok := c.memory.get(key); ok {
		return known, nil // it was done while we came here
	}
	restless := traits.restless || anyText(request.Values, isRestless)
	if restless {
		if known, ok := c.disk.get(key); ok {
			c.memory.put(key, known)
			return known.objects, nil
		}
	}
	rendered, err := request.render()
	if err != nil {
		return nil, fmt.Errorf("render chart %s %s: %w", request.Chart.Name, request.Chart.Version, err)
	}
	if restless {
		if err := c.disk.put(key, rendered); err != nil {
			return nil, err
		}
	}
	c.memory.put(key, rendered)
	return rendered.objects, nil
}

// key tells requests apart.
func (r ChartRequest) key() (string, error) {
	r.Chart = source.Chart{Digest: r.Chart.Digest}
	r.APIVersions = slices.Clone(r.APIVersions)
	slices.Sort(r.APIVersions)
	raw, err := json.Marshal(r)
	if err != nil {
		return "", phase.Invalid{Err: fmt.Errorf("encode the values of release %s/%s: %w", r.Namespace, r.Name, err)}
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

func (r ChartRequest) render() (rendering, error) {
	chart, err := load(r.Chart)
	if err != nil {
		return rendering{}, err
	}
	values := clone(r.Values)
	if err := chartutil.ProcessDependencies(chart, values); err != nil {
		return rendering{}, phase.Invalid{Err: fmt.Errorf("process the subcharts: %w", err)}
	}
	result := rendering{}
	if !r.SkipCRDs {
		for _, crd := range chart.CRDObjects() {
			if err := result.add(crd.Filename, crd.File.Data); err != nil {
				return rendering{}, err
			}
		}
		keep(result.objects)
	}
	capabilities, err := r.capabilities(result.objects)
	if err != nil {
		return rendering{}, err
	}
	options := common.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}
	full, err := chartvalues.ToRenderValuesWithSchemaValidation(chart, values, options, capabilities, r.SkipSchemaValidation)
	if err != nil {
		return rendering{}, phase.Invalid{Err: oneLine(err)}
	}
	texts, err := engine.Engine{}.Render(chart, full)
	if err != nil {
		return rendering{}, phase.Invalid{Err: oneLine(err)}
	}
	for _, name := range templates(texts) {
		if err := result.add(name, []byte(texts[name])); err != nil {
			return rendering{}, err
		}
	}
	lasting, hooks := split(result.objects)
	if len(hooks) > 0 && !r.DisableHooks {
		return rendering{}, refusal(hooks)
	}
	result.objects = lasting
	return result, nil
}

// keep makes CRDs outlive their release, unless the chart says otherwise: with them would go every object of their kinds, the users' own
// too. Helm never deletes what it finds in a chart's crds directories.
func keep(crds []*unstructured.Unstructured) {
	for _, crd := range crds {
		annotations := crd.GetAnnotations()
		if _, said := annotations[kube.AnnotationKeep]; said {
			continue
		}
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[kube.AnnotationKeep] = "keep"
		crd.SetAnnotations(annotations)
	}
}

// templates returns the names of the rendered files that hold objects, sorted.
func templates(texts map[string]string) []string {
	var names []string
	for name := range texts {
		base := path.Base(name)
		if strings.HasPrefix(base, "_") || strings.EqualFold(base, "NOTES.txt") {
			continue
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// load reads the archive. Helm changes a chart while it renders it, so every rendering loads its own.
func load(chart source.Chart) (*helmchart.Chart, error) {
	loaded, err := loader.LoadFile(chart.Path)
	if err != nil {
		return nil, fmt.Errorf("load chart %s %s: %w", chart.Name, chart.Version, err)
	}
	return loaded, nil
}

// capabilities are the member's, and what the chart's own CRDs add to them: an installation has them in place before it renders.
func (r ChartRequest) capabilities(crds []*unstructured.Unstructured) (*common.Capabilities, error) {
	capabilities := common.DefaultCapabilities.Copy()
	version, err := common.ParseKubeVersion(r.KubeVersion)
	if err != nil {
		return nil, phase.Invalidf("the Kubernetes version %q of the cluster: %w", r.KubeVersion, err)
	}
	capabilities.KubeVersion = *version
	served := slices.Clone(r.APIVersions)
	if len(served) == 0 {
		// No template looks at the list.
		served = slices.Clone([]string(common.DefaultVersionSet))
	}
	for _, crd := range crds {
		served = append(served, servedBy(crd)...)
	}
	slices.Sort(served)
	capabilities.APIVersions = slices.Compact(served)
	return capabilities, nil
}

// servedBy returns what a CRD adds to the list of API versions.
func servedBy(crd *unstructured.Unstructured) []string {
	group, _, _ := unstructured.NestedString(crd.Object, "spec", "group")
	kind, _, _ := unstructured.NestedString(crd.Object, "spec", "names", "kind")
	versions, _, _ := unstructured.NestedSlice(crd.Object, "spec", "versions")
	var served []string
	for _, version := range versions {
		fields, ok := version.(map[string]any)
		if !ok || fields["served"] != true {
			continue
		}
		api := fmt.Sprintf("%s/%v", group, fields["name"])
		served = append(served, api, api+"/"+kind)
	}
	return served
}

// rendering is the result of one request. It is never changed once it is made.
type rendering struct {
	objects []*unstructured.Unstructured
	size    int // bytes of text that the objects came from
}

// add reads the objects in text, which has come from the file or template of that name.
func (r *rendering) add(name string, text []byte) error {
	if r.size += len(text); r.size > maxRendering {
		return phase.Invalidf("it renders to more than %d MiB", maxRendering>>20)
	}
	found, err := kube.DecodeLenient(text)
	if err != nil {
		return phase.Invalidf("%s, %w", name, err)
	}
	r.objects = append(r.objects, found...)
	return nil
}

// oneLine returns err with the lists that Helm spreads over several lines on one.
func oneLine(err error) error {
	var lines []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return errors.New(strings.Join(lines, " "))
}

// clone copies the maps in values, which Helm writes to.
func clone(values map[string]any) map[string]any {
	copied := make(map[string]any, len(values))
	for key, value := range values {
		if nested, ok := value.(map[string]any); ok {
			value = clone(nested)
		}
		copied[key] = value
	}
	return copied
}
