package render

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
	helmrelease "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// maxRendering is how many bytes one chart may be rendered to. A hub must live through any chart.
const maxRendering = 256 << 20

// notesFile ends the paths of templates that hold notes.
const notesFile = "NOTES.txt"

// ChartRequest is everything that a rendering depends on.
type ChartRequest struct {
	Chart source.Chart
	// Values is the result of the function Values. The default values of the chart apply where Values sets nothing.
	Values    map[string]any
	Name      string // of the release
	Namespace string // of the release
	// KubeVersion and APIVersions ("group/version" and "group/version/Kind") are those of the member. KubeVersion is
	// required. APIVersions is required if the chart reads .Capabilities.APIVersions.
	KubeVersion string
	APIVersions []string
	// SkipCRDs omits the objects of the chart's crds directories.
	SkipCRDs bool
	// SkipSchemaValidation accepts values that the chart's schema does not.
	SkipSchemaValidation bool
	// DisableHooks omits all hooks.
	DisableHooks bool
	// SubNotes adds the notes of the subcharts to those of the chart.
	SubNotes bool
	// Revision and IsUpgrade are .Release.Revision and .Release.IsUpgrade in templates. A Revision of zero means 1. If
	// IsUpgrade is false, .Release.IsInstall is true.
	Revision  int
	IsUpgrade bool

	// Owner names the release on its member. Renderings that depend on Generated or Lookup are not shared with other
	// owners.
	Owner string `json:"-"`
	// Generated returns the values that former renderings of the release generated. It is called only for a chart that
	// is rendered for each member. Their sum with Release.Generated, see Generated.Add, must be kept before
	// the release is delivered.
	Generated func(ctx context.Context) (Generated, error) `json:"-"`
	// Lookup reads the member for charts that call lookup. If it is nil, lookup finds only the Secrets and ConfigMaps of
	// the last rendering in Generated.
	Lookup LookupFunc `json:"-"`

	// onlyHas is true if the chart reads no more of APIVersions than results of .Capabilities.APIVersions.Has.
	onlyHas bool
	// asked collects the arguments of .Capabilities.APIVersions.Has if it is not nil.
	asked map[string]bool
}

// Charts renders charts as Helm does. It reads no cluster, except for lookup, and sends no request to the network.
//
// Members share identical renderings: requests that differ only in inputs that the chart does not read, see chartFacts,
// have one result. A chart is rendered for each release on each member, see ChartRequest.Owner, if it generates values,
// or if it looks up objects that it renders itself, or that ChartRequest.Lookup reads.
type Charts struct {
	flights singleflight.Group
	// shared caches releases for all members, own releases for one member.
	shared, own *releaseCache
	facts       *factsCache
}

// NewCharts returns Charts.
func NewCharts() *Charts {
	return &Charts{shared: newReleaseCache(maxShared), own: newReleaseCache(maxOwn), facts: newFactsCache()}
}

// Render returns a release. Errors name the chart and the template or value. An error of the chart or its values is
// phase.Invalid. Other errors can be retried: of ctx, of reading the archive, of the functions in request, and if the
// Kubernetes version or a required list of APIs is not known yet.
//
// Go cannot stop a running template: if ctx ends, Render returns at once and the template continues in the background.
func (c *Charts) Render(ctx context.Context, request ChartRequest) (Release, error) {
	facts, err := c.facts.get(request.Chart)
	if err != nil {
		return Release{}, err
	}
	if request, err = facts.normalizeRequest(request); err != nil {
		return Release{}, err
	}
	key, err := request.key()
	if err != nil {
		return Release{}, err
	}
	var release Release
	if request.onlyHas {
		release, err = c.renderForAnswers(ctx, request)
	} else {
		release, err = c.renderOnce(ctx, key, request)
	}
	if release.needsMember || release.Unanswered && request.Lookup != nil {
		return c.renderForMember(ctx, key, request)
	}
	return release, err
}

// Inputs returns a digest of the chart, the values and the options if a template may read the revision or the
// operation, otherwise "". The digest does not depend on the revision and the operation.
func (c *Charts) Inputs(request ChartRequest) (string, error) {
	facts, err := c.facts.get(request.Chart)
	if err != nil {
		return "", err
	}
	revision, operation := facts.usesRelease(request)
	if !revision && !operation {
		return "", nil
	}
	if request, err = facts.normalizeRequest(request); err != nil {
		return "", err
	}
	return request.inputs()
}

// inputs returns a digest of the chart, the values and the options.
func (r ChartRequest) inputs() (string, error) {
	r.Revision, r.IsUpgrade = 0, false
	// A new API on the member must not cause an upgrade that nobody requested.
	r.KubeVersion, r.APIVersions = "", nil
	return r.key()
}

// renderOnce returns the rendering for all members from the cache, or renders it.
func (c *Charts) renderOnce(ctx context.Context, key string, request ChartRequest) (Release, error) {
	if known, ok := c.shared.get(key); ok {
		return known, nil
	}
	return c.once(ctx, key, request, func() (Release, error) { return c.renderForAll(key, request) })
}

// renderForAll renders a chart without generated values, and without lookup.
func (c *Charts) renderForAll(key string, request ChartRequest) (Release, error) {
	if known, ok := c.shared.get(key); ok {
		return known, nil // rendered since the caller looked
	}
	release, err := request.render(newSharedCalls())
	if err == nil {
		c.shared.put(key, release)
	}
	return release, err
}

// renderForMember renders a chart with the values that it generated before. shared is the key of the rendering for all
// members.
func (c *Charts) renderForMember(ctx context.Context, shared string, request ChartRequest) (Release, error) {
	var stored Generated
	if request.Generated != nil {
		var err error
		if stored, err = request.Generated(ctx); err != nil {
			return Release{}, fmt.Errorf("render chart %s: %w", request.Chart.Name, err)
		}
	}
	key, err := request.ownKey(shared, stored)
	if err != nil {
		return Release{}, err
	}
	if known, ok := c.own.get(key); ok {
		return known, nil
	}
	inputs, err := request.inputs()
	if err != nil {
		return Release{}, err
	}
	release, err := c.once(ctx, key, request, func() (Release, error) {
		return request.render(newMemberCalls(stored, request.Lookup, inputs, request.IsUpgrade))
	})
	if err != nil || release.isTransient {
		return release, err
	}
	// The next request comes with the values of this one.
	if key, err = request.ownKey(shared, stored.Add(release.Generated)); err != nil {
		return Release{}, err
	}
	c.own.put(key, release)
	return release, nil
}

// once calls render for one of the callers that ask for the same at once. Its error names the chart.
func (c *Charts) once(ctx context.Context, key string, request ChartRequest, render func() (Release, error)) (Release, error) {
	flight := c.flights.DoChan(key, func() (any, error) { return render() })
	select {
	case <-ctx.Done():
		return Release{}, fmt.Errorf("render chart %s: %w", request.Chart.Name, ctx.Err())
	case done := <-flight:
		release, _ := done.Val.(Release)
		if done.Err != nil {
			return release, fmt.Errorf("render chart %s %s: %w", request.Chart.Name, request.Chart.Version, done.Err)
		}
		return release, nil
	}
}

// ownKey returns the cache key of a rendering for one member. shared is the key of the rendering for all members.
func (r ChartRequest) ownKey(shared string, stored Generated) (string, error) {
	raw, err := json.Marshal([]any{shared, r.Owner, r.Lookup != nil, stored})
	if err != nil {
		return "", fmt.Errorf("encode generated values: %w", err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// key returns the cache key of a request.
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

func (r ChartRequest) render(calls *templateCalls) (Release, error) {
	chart, err := load(r.Chart)
	if err != nil {
		return Release{}, err
	}
	values := clone(r.Values)
	if err := chartutil.ProcessDependencies(chart, values); err != nil {
		return Release{}, phase.Invalid{Err: fmt.Errorf("process the subcharts: %w", err)}
	}
	collected := &releaseBuilder{}
	if err := r.addCRDs(collected, chart); err != nil {
		return Release{}, err
	}
	texts, err := r.execute(chart, values, collected.crds, calls)
	// A template that fails because lookup finds nothing may succeed with the objects of a member.
	needsMember := calls.needsMember || err != nil && len(calls.lookedUp) > 0
	switch {
	case needsMember && !calls.forMember:
		return Release{needsMember: true, asked: r.asked, size: minSize}, nil
	case err != nil && calls.failure != nil:
		return Release{}, calls.failure // the member may answer the next time
	case err != nil:
		return Release{Unanswered: calls.unanswered}, err
	}
	return r.buildRelease(chart, collected, texts, calls)
}

// buildRelease returns the release with the rendered templates in texts.
func (r ChartRequest) buildRelease(chart *helmchart.Chart, collected *releaseBuilder, texts map[string]string, calls *templateCalls) (Release, error) {
	notes := r.cutNotes(chart, texts)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if err := collected.addTemplate(name, texts[name], r.DisableHooks); err != nil {
			return Release{Unanswered: calls.unanswered, needsMember: !calls.forMember && len(calls.lookedUp) > 0}, err
		}
	}
	metadata, err := json.Marshal(chart.Metadata)
	if err != nil {
		return Release{}, phase.Invalid{Err: fmt.Errorf("encode Chart.yaml: %w", err)}
	}
	defaults, err := json.Marshal(chart.Values)
	if err != nil {
		return Release{}, phase.Invalid{Err: fmt.Errorf("encode the default values: %w", err)}
	}
	release := collected.build()
	if !calls.forMember && calls.findsOwnObject(release.Objects, r.Namespace) {
		return Release{needsMember: true, asked: r.asked, size: minSize}, nil
	}
	release.asked = r.asked
	release.Chart, release.Defaults, release.Notes = metadata, defaults, notes
	if err := calls.keepRendered(release.Objects, r.Namespace); err != nil {
		return Release{}, err
	}
	kept, all := calls.kept()
	release.Generated, release.isTransient = kept, !all
	release.MemberSpecific, release.Unanswered = calls.memberSpecific, calls.unanswered
	release.size += len(defaults) + len(notes) + kept.size()
	return release, nil
}

// addCRDs adds the objects of the crds directories, unless the request omits them.
func (r ChartRequest) addCRDs(collected *releaseBuilder, chart *helmchart.Chart) error {
	if r.SkipCRDs {
		return nil
	}
	for _, crd := range chart.CRDObjects() {
		if err := collected.addCRDs(crd.Filename, crd.File.Data); err != nil {
			return err
		}
	}
	keep(collected.crds)
	return nil
}

// execute returns the rendered templates by their paths.
func (r ChartRequest) execute(chart *helmchart.Chart, values map[string]any, crds []releaseObject, calls *templateCalls) (map[string]string, error) {
	capabilities, err := r.capabilities(crds)
	if err != nil {
		return nil, err
	}
	options := common.ReleaseOptions{
		Name: r.Name, Namespace: r.Namespace, Revision: max(1, r.Revision), IsInstall: !r.IsUpgrade, IsUpgrade: r.IsUpgrade,
	}
	full, err := chartvalues.ToRenderValuesWithSchemaValidation(chart, values, options, capabilities, r.SkipSchemaValidation)
	if err != nil {
		return nil, phase.Invalid{Err: oneLine(err)}
	}
	if r.asked != nil {
		full["Capabilities"] = &recordedCapabilities{capabilities, recordedVersions{capabilities.APIVersions, r.asked}}
	}
	if calls.forMember {
		markTemplates(chart)
	}
	texts, err := engine.Engine{CustomTemplateFuncs: calls.functions()}.Render(chart, full)
	if err != nil {
		return nil, phase.Invalid{Err: oneLine(err)}
	}
	return texts, nil
}

// cutNotes takes the notes out of the rendered templates and returns those of the chart, followed by those of its
// subcharts if they are asked for.
func (r ChartRequest) cutNotes(chart *helmchart.Chart, texts map[string]string) string {
	own := path.Join(chart.Name(), "templates", notesFile)
	var notes []string
	if text, ok := texts[own]; ok {
		notes = append(notes, text)
	}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if !strings.HasSuffix(name, notesFile) {
			continue
		}
		if r.SubNotes && name != own {
			notes = append(notes, texts[name])
		}
		delete(texts, name)
	}
	return strings.Join(notes, "\n")
}

// keep adds the annotation that keeps CRDs when their release is uninstalled, unless the chart sets it: the deletion of
// a CRD deletes all its custom resources. Helm does not delete objects of the crds directories either. keep also
// removes the hook annotation, since some CRDs still have crd-install of Helm 2.
func keep(crds []releaseObject) {
	for _, crd := range crds {
		annotations := crd.object.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		delete(annotations, helmrelease.HookAnnotation)
		if _, ok := annotations[kube.AnnotationKeep]; !ok {
			annotations[kube.AnnotationKeep] = "keep"
		}
		crd.object.SetAnnotations(annotations)
	}
}

// load reads the archive. Helm changes a chart while it renders it, so every rendering loads its own.
func load(chart source.Chart) (*helmchart.Chart, error) {
	loaded, err := loader.LoadFile(chart.Path)
	if err != nil {
		return nil, fmt.Errorf("load chart %s %s: %w", chart.Name, chart.Version, err)
	}
	return loaded, nil
}

// capabilities returns the member's capabilities with the API versions of the chart's own CRDs, which Helm installs
// before it renders.
func (r ChartRequest) capabilities(crds []releaseObject) (*common.Capabilities, error) {
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
		served = append(served, servedBy(crd.object)...)
	}
	slices.Sort(served)
	capabilities.APIVersions = slices.Compact(served)
	return capabilities, nil
}

// servedBy returns the entries that a CRD adds to the list of API versions.
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
