package render

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"

	helmrelease "helm.sh/helm/v4/pkg/release/v1"
	releaseutil "helm.sh/helm/v4/pkg/release/v1/util"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/towline/towline/internal/cache"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// Release is a rendered chart. Callers share it and must not change it.
type Release struct {
	// Objects has the CRDs of the crds directories, then the manifest in the install order of Helm, then the hooks. Hooks
	// have the annotation helm.sh/hook.
	Objects []*unstructured.Unstructured
	// Documents caches the JSON of Objects.
	Documents *kube.Documents
	// Paths has the template path of each object, in the order of Objects.
	Paths []string
	// Chart is the content of Chart.yaml as JSON, as Helm stores it in its release record.
	Chart json.RawMessage
	// Defaults are the default values of the chart and its subcharts as JSON, as Helm stores them in its release record.
	Defaults json.RawMessage
	// Notes is the rendered NOTES.txt.
	Notes string
	// Generated has the generated values and the lookup results that this release uses, and its objects for the lookups of
	// the next upgrade. If the lookup results have more than 64 KiB together, they are omitted. If the objects have more,
	// the largest ones are omitted.
	Generated Generated
	// Unanswered is true if a call of lookup found nothing because ChartRequest.Lookup is nil. A call does not count if
	// Generated has its object for the next upgrade: before the installation, the empty result is right.
	Unanswered bool
	// MemberSpecific is true if the release contains values that were generated for one member, or read from it.
	MemberSpecific bool
	// IsTransient is true if results of lookup were omitted, so that each rendering must read the member.
	IsTransient bool

	// needsMember is true if the chart must be rendered for each member: it generates values, or may look up a Secret or
	// ConfigMap of its own. The release has no objects then.
	needsMember bool
	// checkedAPIs is ChartRequest.checkedAPIs after the rendering.
	checkedAPIs checkedAPIs
	// apiVariants is set only in a cache entry that lists renderings, see renderForCheckedAPIs. All other fields of such
	// an entry are empty.
	apiVariants apiVariants
}

// size returns the memory of the release in bytes.
func (r Release) size() int {
	size := cache.MinSize + int(r.Documents.Memory()) + len(r.Chart) + len(r.Defaults) + len(r.Notes) + r.Generated.size()
	for _, path := range r.Paths {
		size += len(path)
	}
	return size + r.checkedAPIs.size()
}

// releaseObject is an object of a release and the path of its template.
type releaseObject struct {
	object *unstructured.Unstructured
	path   string
}

// releaseBuilder collects the objects of a release, and counts them against the limits.
type releaseBuilder struct {
	crds, manifest, hooks []releaseObject
	size, count           int // the bytes of the rendered texts, and the number of their objects
}

// addCRDs adds the objects of a file of a crds directory.
func (p *releaseBuilder) addCRDs(path string, text []byte) error {
	found, err := p.decode(path, text, kube.DecodeLenient) // the last of duplicate keys counts, as in Helm
	p.crds = append(p.crds, found...)
	return err
}

// addTemplate adds the objects of a rendered template. As in Helm, it omits hooks with an unknown event, such as
// crd-install of Helm 2.
func (p *releaseBuilder) addTemplate(path, text string, disableHooks bool) error {
	separated := []byte(separateDocuments(text))
	found, err := p.decode(path, separated, kube.DecodeHelmManifest)
	if err == nil && slices.ContainsFunc(found, releaseObject.isHook) {
		// Helm adds a line break to the documents of the manifest, but not to hooks.
		var unchanged []releaseObject
		unchanged, err = decodeTemplate(path, separated, kube.DecodeLenient)
		for i := range unchanged {
			if unchanged[i].isHook() {
				found[i] = unchanged[i]
			}
		}
	}
	for _, part := range found {
		hook := part.object.GetAnnotations()[helmrelease.HookAnnotation]
		switch {
		case !part.isHook():
			p.manifest = append(p.manifest, part)
		case !disableHooks && hasKnownEvents(hook):
			p.hooks = append(p.hooks, part)
		}
	}
	return err
}

func (p releaseObject) isHook() bool {
	_, isHook := p.object.GetAnnotations()[helmrelease.HookAnnotation]
	return isHook
}

// separateDocuments adds a space after each document separator. Templates that trim line breaks produce "---apiVersion:
// v1", which Helm accepts.
func separateDocuments(text string) string {
	return regexp.MustCompile(`(?m)^---[ \t]*`).ReplaceAllString(text, "--- ")
}

// decode decodes the objects in text, and counts them. It fails if the release exceeds maxRenderedSize or
// kube.MaxObjects.
func (p *releaseBuilder) decode(path string, text []byte, decode func([]byte) ([]*unstructured.Unstructured, error)) ([]releaseObject, error) {
	if p.size += len(text); p.size > maxRenderedSize {
		return nil, phase.TerminalErrorf("it renders to more than %d MiB", maxRenderedSize>>20)
	}
	found, err := decodeTemplate(path, text, decode)
	if err != nil {
		return nil, err
	}
	if p.count += len(found); p.count > kube.MaxObjects {
		return nil, phase.TerminalErrorf("it renders to more than %d objects", kube.MaxObjects)
	}
	return found, nil
}

func decodeTemplate(path string, text []byte, decode func([]byte) ([]*unstructured.Unstructured, error)) ([]releaseObject, error) {
	objects, err := decode(text)
	if err != nil {
		return nil, phase.TerminalErrorf("%s, %w", kube.OneLine(path), err)
	}
	found := make([]releaseObject, 0, len(objects))
	for _, object := range objects {
		convertAnnotations(object)
		found = append(found, releaseObject{object: object, path: path})
	}
	return found, nil
}

// convertAnnotations converts annotation values that are numbers, booleans or null to strings, as Helm does.
func convertAnnotations(object *unstructured.Unstructured) {
	annotations, _, _ := unstructured.NestedFieldNoCopy(object.Object, "metadata", "annotations")
	values, _ := annotations.(map[string]any)
	for key, value := range values {
		switch value.(type) {
		case bool, int64, float64:
			values[key] = fmt.Sprint(value)
		case nil:
			values[key] = ""
		}
	}
}

// build returns the release with the collected objects in Helm's order.
func (p *releaseBuilder) build() Release {
	var release Release
	for _, list := range [][]releaseObject{p.crds, sortByKind(p.manifest), sortByKind(p.hooks)} {
		for _, part := range list {
			release.Objects = append(release.Objects, part.object)
			release.Paths = append(release.Paths, part.path)
		}
	}
	release.Documents = kube.NewDocuments(release.Objects)
	return release
}

// sortByKind sorts objects in Helm's install order: known kinds first, then other kinds by name. It is stable.
func sortByKind(parts []releaseObject) []releaseObject {
	rank := func(kind string) int {
		if at := slices.Index(releaseutil.InstallOrder, kind); at >= 0 {
			return at
		}
		return len(releaseutil.InstallOrder)
	}
	slices.SortStableFunc(parts, func(a, b releaseObject) int {
		kindA, kindB := a.object.GetKind(), b.object.GetKind()
		return cmp.Or(cmp.Compare(rank(kindA), rank(kindB)), strings.Compare(kindA, kindB))
	})
	return parts
}

// hasKnownEvents returns whether Helm knows all events of a hook.
func hasKnownEvents(hook string) bool {
	for event := range strings.SplitSeq(hook, ",") {
		switch helmrelease.HookEvent(strings.ToLower(strings.TrimSpace(event))) {
		case helmrelease.HookPreInstall, helmrelease.HookPostInstall, helmrelease.HookPreUpgrade, helmrelease.HookPostUpgrade,
			helmrelease.HookPreDelete, helmrelease.HookPostDelete, helmrelease.HookPreRollback, helmrelease.HookPostRollback,
			helmrelease.HookTest, "test-success":
		default:
			return false
		}
	}
	return true
}
