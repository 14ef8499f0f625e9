package render

import (
	"bytes"
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
	"sync"

	"golang.org/x/sync/singleflight"
	"helm.sh/helm/v4/pkg/chart/common"
	chartvalues "helm.sh/helm/v4/pkg/chart/common/util"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	helmrelease "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/sandbox"
	"github.com/towline/towline/internal/source"
)

// maxRenderedSize is the maximum size in bytes of the rendered text of one chart. It limits the memory of the hub.
const maxRenderedSize = 256 << 20

// maxSharedSize and maxMemberSize limit the two caches of Charts in bytes of memory: the releases that all members
// share, and the releases for one member. Decoded objects and their JSON need about eleven times the size of their
// text.
const (
	maxSharedSize = 96 << 20
	maxMemberSize = 32 << 20
)

// notesFile is the file name of the templates with notes.
const notesFile = "NOTES.txt"

// ChartRequest has all inputs of a rendering. Its JSON is the cache key.
type ChartRequest struct {
	Chart source.Chart
	// Values is the result of the function Values. The default values of the chart apply where Values sets nothing.
	Values    map[string]any
	Name      string // of the release
	Namespace string // of the release
	// KubeVersion is the Kubernetes version of the member, and APIVersions has its API versions ("group/version" and
	// "group/version/Kind"). KubeVersion is required. APIVersions is required if the chart reads
	// .Capabilities.APIVersions.
	KubeVersion string
	APIVersions []string
	// SkipCRDs omits the objects of the chart's crds directories.
	SkipCRDs bool
	// SkipSchemaValidation accepts values that the chart's schema does not.
	SkipSchemaValidation bool
	// DisableHooks omits all hooks.
	DisableHooks bool
	// SubNotes adds the notes of the subcharts to the notes of the chart.
	SubNotes bool
	// Revision and IsUpgrade are .Release.Revision and .Release.IsUpgrade in templates. A Revision of zero means 1. If
	// IsUpgrade is false, .Release.IsInstall is true.
	Revision  int
	IsUpgrade bool
	// Scope is the Scope of the sandbox.Call, see the package comment. Only requests with the same Scope share a
	// rendering.
	Scope string `json:",omitempty"`
	// Memory reserves the memory of the result, and is released by the caller. Nil means no limit.
	Memory *kube.ContentReservation `json:"-"`

	// Owner names the release on its member. Renderings that depend on Generated or Lookup are not shared with other
	// owners.
	Owner string `json:"-"`
	// Generated returns the stored results of former renderings of the release. It is called only if the chart must be
	// rendered for each member. Before the caller delivers the release, it must store
	// stored.AfterRendering(release.Generated), where stored is the result of this call.
	Generated func(ctx context.Context) (Generated, error) `json:"-"`
	// Lookup reads the member for charts that call lookup. If it is nil, lookup finds only the Secrets and ConfigMaps of
	// the last rendering in Generated.
	Lookup LookupFunc `json:"-"`
	// LookupAccount is the ServiceAccount that Lookup impersonates on the member, "" for the account of the hub. Results
	// are not used for another account, which may have other permissions.
	LookupAccount string `json:"-"`

	// onlyChecksAPIs is true if the only use of APIVersions in the chart is .Capabilities.APIVersions.Has.
	onlyChecksAPIs bool
	// archive is the content of Chart.Path in a child of the sandbox, which cannot open files.
	archive []byte
	// checkedAPIs records the arguments of .Capabilities.APIVersions.Has, if it is not nil.
	checkedAPIs checkedAPIs
}

// Charts renders charts as Helm does. It reads no cluster, except for lookup, and sends no request to the network. It
// is safe for concurrent use.
//
// Members share a rendering if their requests have the same Scope and differ only in inputs that the chart does not
// read, see chartFacts. Other charts are rendered for each Owner: charts that generate values, that look up objects
// which they render themselves, or whose lookups ChartRequest.Lookup answers.
type Charts struct {
	inFlight singleflight.Group
	// sharedReleases caches releases for all members, memberReleases releases for one member.
	sharedReleases, memberReleases *cache.Cache[Release]
	variantsMu                     sync.Mutex // guards the read and the write of the apiVariants in sharedReleases
	facts                          *factsCache
	// sandbox renders in child processes that have SandboxFunctions. If it is nil, charts are rendered in this process.
	sandbox *sandbox.Pool
}

// NewCharts returns Charts with empty caches, which renders in the sandbox. Without a sandbox it renders in this
// process, and a template that does not end is not stopped.
func NewCharts(inSandbox *sandbox.Pool) *Charts {
	return &Charts{sandbox: inSandbox, sharedReleases: cache.New[Release](maxSharedSize), memberReleases: cache.New[Release](maxMemberSize), facts: newFactsCache()}
}

// Render returns a release. Errors name the chart and the template or value. An error in the chart or its values is a
// phase.TerminalError. The caller can retry all other errors. They occur if ctx ends, the archive cannot be read, a
// function in request fails, or the Kubernetes version or a required list of APIs is not known yet. A
// sandbox.LimitError is returned for templates that take too much time or memory.
//
// If ctx ends, Render returns at once and the templates continue in the background until their limit.
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
	if request.onlyChecksAPIs {
		release, err = c.renderForCheckedAPIs(ctx, request)
	} else {
		release, err = c.renderShared(ctx, key, request)
	}
	// With the data of the member, a rendering that failed can succeed.
	if release.needsMember || release.Unanswered && request.Lookup != nil {
		return c.renderForMember(ctx, key, request)
	}
	return release, err
}

// InputsDigest returns a digest of the chart, the values and the options, or "" if no template reads the revision or
// the operation. The digest does not depend on the revision and the operation.
func (c *Charts) InputsDigest(request ChartRequest) (string, error) {
	facts, err := c.facts.get(request.Chart)
	if err != nil {
		return "", err
	}
	revision, operation := facts.usesReleaseFields(request)
	if !revision && !operation {
		return "", nil
	}
	if request, err = facts.normalizeRequest(request); err != nil {
		return "", err
	}
	return request.inputsDigest()
}

// ReadsCapabilities returns whether the result can depend on the Kubernetes version, and on the API versions, of the
// member.
func (c *Charts) ReadsCapabilities(request ChartRequest) (version, apis bool, err error) {
	facts, err := c.facts.get(request.Chart)
	valuesUseCapabilities := containsText(request.Values, usesCapabilities)
	return facts.kubeVersion != "" || facts.usesVersion || valuesUseCapabilities, facts.usesAPIs || valuesUseCapabilities, err
}

// inputsDigest returns a digest of the chart, the values and the options.
func (r ChartRequest) inputsDigest() (string, error) {
	r.Revision, r.IsUpgrade, r.Scope = 0, false, ""
	// The digest does not depend on the versions of the member: a new API on the member must not upgrade the release.
	r.KubeVersion, r.APIVersions = "", nil
	return r.key()
}

// renderShared returns the rendering for all members from the cache, or renders it.
func (c *Charts) renderShared(ctx context.Context, key string, request ChartRequest) (Release, error) {
	if known, ok := c.sharedReleases.Get(key); ok {
		return known, nil
	}
	return c.renderDeduplicated(ctx, key, request, func() (Release, error) { return c.renderForAll(key, request) })
}

// renderForAll renders a chart for all members: templates that generate values end it, and lookup finds nothing.
func (c *Charts) renderForAll(key string, request ChartRequest) (Release, error) {
	if known, ok := c.sharedReleases.Get(key); ok {
		return known, nil // another call has rendered it meanwhile
	}
	release, err := c.renderUncached(request, nil)
	if err == nil {
		c.sharedReleases.GetOrPut(key, release, release.size()) // keeps an existing entry
	}
	return release, err
}

// renderForMember renders a chart with its stored generated values. sharedKey is the key of the rendering for all
// members.
func (c *Charts) renderForMember(ctx context.Context, sharedKey string, request ChartRequest) (Release, error) {
	var stored Generated
	if request.Generated != nil {
		var err error
		if stored, err = request.Generated(ctx); err != nil {
			return Release{}, fmt.Errorf("render chart %s: %w", request.Chart.Name, err)
		}
	}
	key, err := request.memberKey(sharedKey, stored)
	if err != nil {
		return Release{}, err
	}
	if known, ok := c.memberReleases.Get(key); ok {
		return known, nil
	}
	inputs, err := request.inputsDigest()
	if err != nil {
		return Release{}, err
	}
	release, err := c.renderDeduplicated(ctx, key, request, func() (Release, error) {
		return c.renderUncached(request, &memberInputs{Stored: stored, HasLookup: request.Lookup != nil, Inputs: inputs + request.LookupAccount})
	})
	if err != nil || release.IsTransient {
		return release, err
	}
	// The next request has this key: the caller stores the values that this rendering has generated.
	if key, err = request.memberKey(sharedKey, stored.AfterRendering(release.Generated)); err != nil {
		return Release{}, err
	}
	c.memberReleases.GetOrPut(key, release, release.size()) // keeps an existing entry
	return release, nil
}

// renderDeduplicated calls render once for concurrent callers with the same key. Its error names the chart.
func (c *Charts) renderDeduplicated(ctx context.Context, key string, request ChartRequest, render func() (Release, error)) (Release, error) {
	result := c.inFlight.DoChan(key, func() (release any, err error) {
		defer func() {
			if reason := recover(); reason != nil {
				err = fmt.Errorf("panic: %v", reason) // in this goroutine, it would end the process
			}
		}()
		return render()
	})
	select {
	case <-ctx.Done():
		return Release{}, fmt.Errorf("render chart %s: %w", request.Chart.Name, ctx.Err())
	case rendered := <-result:
		release, _ := rendered.Val.(Release)
		if rendered.Err != nil {
			return release, fmt.Errorf("render chart %s %s: %w", request.Chart.Name, request.Chart.Version, rendered.Err)
		}
		return release, nil
	}
}

// memberKey returns the cache key of a rendering for one member. sharedKey is the key of the rendering for all members.
func (r ChartRequest) memberKey(sharedKey string, stored Generated) (string, error) {
	raw, err := json.Marshal([]any{sharedKey, r.Owner, r.Lookup != nil, r.LookupAccount, stored})
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
		return "", phase.TerminalError{Err: fmt.Errorf("encode the values of release %s/%s: %w", r.Namespace, r.Name, err)}
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// render executes the templates with the given functions. Callers must also use the Release that it returns beside an
// error: needsMember is true if the chart must be rendered again for the member, and Unanswered if a lookup found
// nothing because the hub cannot read the member.
func (r ChartRequest) render(functions *templateFunctions) (Release, error) {
	chart, err := r.load()
	if err != nil {
		return Release{}, err
	}
	values := cloneMaps(r.Values)
	if err := chartutil.ProcessDependencies(chart, values); err != nil {
		return Release{}, phase.TerminalError{Err: fmt.Errorf("process the subcharts: %w", err)}
	}
	builder := &releaseBuilder{}
	if err := r.addCRDs(builder, chart); err != nil {
		return Release{}, err
	}
	texts, err := r.execute(chart, values, builder.crds, functions)
	// A template can fail because lookup found nothing. With the objects of the member it can succeed.
	needsMember := functions.needsMember || err != nil && len(functions.lookedUp) > 0
	switch {
	case needsMember && !functions.forMember:
		return Release{needsMember: true, checkedAPIs: r.checkedAPIs}, nil
	case err != nil && functions.lookupErr != nil:
		return Release{}, functions.lookupErr // it can be retried, unlike an error of the template
	case err != nil:
		return Release{Unanswered: functions.unanswered}, err
	}
	return r.buildRelease(chart, builder, texts, functions)
}

// buildRelease returns the release with the rendered templates in texts.
func (r ChartRequest) buildRelease(chart *helmchart.Chart, builder *releaseBuilder, texts map[string]string, functions *templateFunctions) (Release, error) {
	notes := r.extractNotes(chart, texts)
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if err := builder.addTemplate(name, texts[name], r.DisableHooks); err != nil {
			return Release{Unanswered: functions.unanswered, needsMember: !functions.forMember && len(functions.lookedUp) > 0}, err
		}
	}
	metadata, err := json.Marshal(chart.Metadata)
	if err != nil {
		return Release{}, phase.TerminalError{Err: fmt.Errorf("encode Chart.yaml: %w", err)}
	}
	defaults, err := json.Marshal(chart.Values)
	if err != nil {
		return Release{}, phase.TerminalError{Err: fmt.Errorf("encode the default values: %w", err)}
	}
	release := builder.build()
	if !functions.forMember && functions.looksUpOwnObject(release.Objects, r.Namespace) {
		return Release{needsMember: true, checkedAPIs: r.checkedAPIs}, nil
	}
	release.checkedAPIs = r.checkedAPIs
	release.Chart, release.Defaults, release.Notes = metadata, defaults, notes
	if err := functions.storeRendered(release.Objects, r.Namespace); err != nil {
		return Release{}, err
	}
	results, isComplete := functions.resultsToStore()
	release.Generated, release.IsTransient = results, !isComplete
	release.MemberSpecific, release.Unanswered = functions.memberSpecific, functions.unanswered
	return release, nil
}

// addCRDs adds the objects of the crds directories unless r.SkipCRDs is true.
func (r ChartRequest) addCRDs(builder *releaseBuilder, chart *helmchart.Chart) error {
	if r.SkipCRDs {
		return nil
	}
	for _, crd := range chart.CRDObjects() {
		if err := builder.addCRDs(crd.Filename, crd.File.Data); err != nil {
			return err
		}
	}
	keepCRDs(builder.crds)
	return nil
}

// execute executes the templates, and returns the rendered texts by template path.
func (r ChartRequest) execute(chart *helmchart.Chart, values map[string]any, crds []releaseObject, functions *templateFunctions) (map[string]string, error) {
	capabilities, err := r.capabilities(crds)
	if err != nil {
		return nil, err
	}
	options := common.ReleaseOptions{
		Name: r.Name, Namespace: r.Namespace, Revision: max(1, r.Revision), IsInstall: !r.IsUpgrade, IsUpgrade: r.IsUpgrade,
	}
	if !r.SkipSchemaValidation {
		if err := checkSchemas(chart); err != nil {
			return nil, err
		}
	}
	renderValues, err := chartvalues.ToRenderValuesWithSchemaValidation(chart, values, options, capabilities, r.SkipSchemaValidation)
	if err != nil {
		return nil, phase.TerminalError{Err: toOneLine(err)}
	}
	if r.checkedAPIs != nil {
		renderValues["Capabilities"] = &recordingCapabilities{capabilities, recordingVersionSet{capabilities.APIVersions, r.checkedAPIs}}
	}
	if functions.forMember {
		markTemplates(chart)
	}
	texts, err := engine.Engine{CustomTemplateFuncs: functions.funcMap()}.Render(chart, renderValues)
	if err != nil {
		return nil, phase.TerminalError{Err: toOneLine(err)}
	}
	return texts, nil
}

// extractNotes removes the notes from texts. It returns the notes of the chart and, if r.SubNotes is true, of its
// subcharts.
func (r ChartRequest) extractNotes(chart *helmchart.Chart, texts map[string]string) string {
	chartNotes := path.Join(chart.Name(), "templates", notesFile)
	var notes []string
	if text, ok := texts[chartNotes]; ok {
		notes = append(notes, text)
	}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		if !strings.HasSuffix(name, notesFile) {
			continue
		}
		if r.SubNotes && name != chartNotes {
			notes = append(notes, texts[name])
		}
		delete(texts, name)
	}
	return strings.Join(notes, "\n")
}

// keepCRDs adds the annotation that keeps CRDs when their release is uninstalled, unless the chart sets it: the
// deletion of a CRD deletes all its custom resources. Helm does not delete objects of the crds directories either.
// keepCRDs also removes the hook annotation, because some CRDs still have crd-install of Helm 2.
func keepCRDs(crds []releaseObject) {
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

// load loads the chart from its archive or, without a sandbox, from its file. Helm changes a chart while it renders it,
// so each rendering needs its own copy.
func (r ChartRequest) load() (*helmchart.Chart, error) {
	if r.archive == nil {
		return loadChart(r.Chart)
	}
	loaded, err := loader.LoadArchive(bytes.NewReader(r.archive))
	if err != nil {
		return nil, fmt.Errorf("load chart %s %s: %w", r.Chart.Name, r.Chart.Version, err)
	}
	return loaded, nil
}

func loadChart(chart source.Chart) (*helmchart.Chart, error) {
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
		return nil, phase.TerminalErrorf("the Kubernetes version %q of the cluster: %w", r.KubeVersion, err)
	}
	capabilities.KubeVersion = *version
	served := slices.Clone(r.APIVersions)
	if len(served) == 0 {
		// No template reads the list.
		served = slices.Clone([]string(common.DefaultVersionSet))
	}
	for _, crd := range crds {
		served = append(served, apiVersionsOfCRD(crd.object)...)
	}
	slices.Sort(served)
	capabilities.APIVersions = slices.Compact(served)
	return capabilities, nil
}

// apiVersionsOfCRD returns the API versions that a CRD adds to .Capabilities.APIVersions.
func apiVersionsOfCRD(crd *unstructured.Unstructured) []string {
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

// toOneLine returns an error with the text of err in one line. Helm spreads lists over several lines.
func toOneLine(err error) error {
	var lines []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return errors.New(strings.Join(lines, " "))
}
