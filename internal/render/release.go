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

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// Release is a rendered chart. It is shared with other callers and must not be changed.
type Release struct {
	// Objects are first the CRDs of the crds directories, then the manifest in Helm's install order, then the hooks, which have the
	// annotation helm.sh/hook.
	Objects []*unstructured.Unstructured
	// Paths are the template paths of Objects, in their order.
	Paths []string
	// Chart is the content of Chart.yaml as JSON, as Helm stores it in its release record.
	Chart json.RawMessage
	// Notes is the rendered NOTES.txt.
	Notes string
	// Generated are the values that the chart generated or looked up, now or before, and that this release has.
	Generated Generated
	// LooksUp says that the chart called lookup.
	LooksUp bool
	// Private says that the release holds values that were generated for one member, or read on it.
	Private bool

	size int // bytes of text that the objects and the notes come from
	// generates says that there is no release that several members may share.
	generates bool
}

// part is one object of a release and the path of its template.
type part struct {
	object *unstructured.Unstructured
	path   string
}

// parts collects the objects of a release.
type parts struct {
	crds, manifest, hooks []part
	size                  int
}

// addCRDs adds the objects of a file of a crds directory.
func (p *parts) addCRDs(path string, text []byte) error {
	found, err := p.decode(path, text, kube.DecodeLenient)
	p.crds = append(p.crds, found...)
	return err
}

// addTemplate adds the objects of a rendered template. Helm skips hooks with an event that it does not know, crd-install of Helm 2
// among them.
func (p *parts) addTemplate(path, text string, disableHooks bool) error {
	separated := []byte(separate(text))
	found, err := p.decode(path, separated, kube.DecodeManifestOfHelm)
	if err == nil && slices.ContainsFunc(found, part.isHook) {
		// Helm leaves the text of hooks as it is.
		var exact []part
		exact, err = p.decode(path, separated, kube.DecodeLenient)
		for i := range exact {
			if exact[i].isHook() {
				found[i] = exact[i]
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

func (p part) isHook() bool {
	_, isHook := p.object.GetAnnotations()[helmrelease.HookAnnotation]
	return isHook
}

// separate sets off the separators of documents from what follows on the same line: Helm takes ---apiVersion: v1 for both, which templates
// that trim line breaks print.
func separate(text string) string {
	return regexp.MustCompile(`(?m)^---[ \t]*`).ReplaceAllString(text, "--- ")
}

// decode reads the objects in text.
func (p *parts) decode(path string, text []byte, decode func([]byte) ([]*unstructured.Unstructured, error)) ([]part, error) {
	if p.size += len(text); p.size > maxRendering {
		return nil, phase.Invalidf("it renders to more than %d MiB", maxRendering>>20)
	}
	objects, err := decode(text)
	if err != nil {
		return nil, phase.Invalidf("%s, %w", path, err)
	}
	found := make([]part, 0, len(objects))
	for _, object := range objects {
		convertAnnotations(object)
		found = append(found, part{object: object, path: path})
	}
	return found, nil
}

// convertAnnotations makes strings of numbers, booleans and null, as Helm reads annotations.
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

// release returns what was collected, in Helm's order.
func (p *parts) release() Release {
	release := Release{size: p.size}
	for _, list := range [][]part{p.crds, sortByKind(p.manifest), sortByKind(p.hooks)} {
		for _, part := range list {
			release.Objects = append(release.Objects, part.object)
			release.Paths = append(release.Paths, part.path)
		}
	}
	return release
}

// sortByKind puts parts in Helm's install order: known kinds first, then the others by name. Parts of one kind keep their order.
func sortByKind(parts []part) []part {
	rank := func(kind string) int {
		if at := slices.Index(releaseutil.InstallOrder, kind); at >= 0 {
			return at
		}
		return len(releaseutil.InstallOrder)
	}
	slices.SortStableFunc(parts, func(a, b part) int {
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
