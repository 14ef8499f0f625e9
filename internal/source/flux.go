package source

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/phase"
)

// FluxGroupVersion returns the API version of Flux's sources.
func FluxGroupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: "source.toolkit.fluxcd.io", Version: "v1"}
}

// FluxKinds returns the kinds of Flux's sources that have an artifact with files.
func FluxKinds() []string {
	return []string{string(libv1beta1.SourceGitRepository), string(libv1beta1.SourceOCIRepository), string(libv1beta1.SourceBucket)}
}

// IsFlux returns whether r is a Flux source.
func (r Reference) IsFlux() bool { return slices.Contains(FluxKinds(), r.Kind) }

// Artifact is the latest archive that Flux's source-controller has made of a source (status.artifact).
type Artifact struct {
	URL string
	// Digest is "<algorithm>:<hex>" of the archive.
	Digest string
	// IsTemplate and IsLua are true if the source has the annotation for templates or for scripts.
	IsTemplate, IsLua bool
}

// Version returns Content.Version for the content of the artifact.
func (a Artifact) Version() string { return fmt.Sprint(a) }

// ArtifactOf returns the artifact of a source, the zero Artifact if it has none. A source that is suspended or not
// ready keeps its last artifact, so its conditions are ignored.
func ArtifactOf(object *unstructured.Unstructured) Artifact {
	field := func(name string) string {
		text, _, _ := unstructured.NestedString(object.Object, "status", "artifact", name) // a wrong type is no artifact
		return text
	}
	_, isTemplate := object.GetAnnotations()[libv1beta1.TemplateAnnotation]
	_, isLua := object.GetAnnotations()[libv1beta1.LuaAnnotation]
	return Artifact{URL: field("url"), Digest: field("digest"), IsTemplate: isTemplate, IsLua: isLua}
}

// noArtifactError returns the error for a source without an artifact. It contains the message of the condition Ready.
func noArtifactError(ref Reference, object *unstructured.Unstructured) error {
	reason := "Flux's source-controller has not reported on it"
	conditions, _, _ := unstructured.NestedSlice(object.Object, "status", "conditions") // a wrong type is no condition
	for _, condition := range conditions {
		if fields, ok := condition.(map[string]any); ok && fields["type"] == "Ready" {
			reason = fmt.Sprint(fields["message"])
		}
	}
	if isSuspended, _, _ := unstructured.NestedBool(object.Object, "spec", "suspend"); isSuspended {
		reason = "it is suspended"
	}
	return fmt.Errorf("%s has no artifact: %s", ref, reason)
}

// NewPendingFluxError returns the error of Artifacts.Objects while the informer cache has not synced.
func NewPendingFluxError(ref Reference, after time.Duration) error {
	return &PendingError{After: after, awaited: ref.String()}
}

// read returns all files of a source. There are none if an optional source does not exist.
func (a *Artifacts) read(ctx context.Context, ref Reference, isOptional bool) (Content, error) {
	artifact, err := a.findArtifact(ctx, ref)
	if isOptional && errors.Is(err, ErrNotFound) {
		return newContent(ref, nil), nil
	}
	if err != nil {
		return Content{}, err
	}
	return a.readTree(ctx, ref, artifact)
}

// manifests returns the manifests of a source at or below directory, see selectManifests. There are none if an optional
// source does not exist.
func (a *Artifacts) manifests(ctx context.Context, ref Reference, isOptional bool, directory string) (Content, error) {
	artifact, err := a.findArtifact(ctx, ref)
	if isOptional && errors.Is(err, ErrNotFound) {
		return newContent(ref, nil), nil
	}
	if err != nil {
		return Content{}, err
	}
	// Concurrent callers share errors, which contain the reference, so it is part of the key.
	content, err := a.selected.GetOrCompute(fmt.Sprintf("%s %s %s", ref, artifact.Digest, directory), func() (Content, int, error) {
		tree, err := a.readTree(ctx, ref, artifact)
		if err != nil {
			return Content{}, 0, err
		}
		content, err := selectManifests(tree, directory)
		return content, int(sizeOf(&content)), err
	})
	content.Template, content.Lua, content.Version = artifact.IsTemplate, artifact.IsLua, artifact.Version()
	return content, err
}

// findArtifact returns the artifact of a source. It fails with ErrNotFound if the object does not exist, and with
// phase.TerminalError for unsupported annotations.
func (a *Artifacts) findArtifact(ctx context.Context, ref Reference) (Artifact, error) {
	object, err := a.Objects(ctx, ref)
	if apierrors.IsNotFound(err) {
		return Artifact{}, fmt.Errorf("%s %w", ref, ErrNotFound)
	}
	if err != nil {
		return Artifact{}, err
	}
	if err := (&Content{Reference: ref}).readAnnotations(object.GetAnnotations()); err != nil {
		return Artifact{}, err
	}
	if _, hasSubresources := object.GetAnnotations()[libv1beta1.SubresourcesAnnotation]; hasSubresources {
		return Artifact{}, phase.TerminalErrorf("%s: annotation %s is for ConfigMaps and Secrets", ref, libv1beta1.SubresourcesAnnotation)
	}
	artifact := ArtifactOf(object)
	if artifact.URL == "" {
		return Artifact{}, noArtifactError(ref, object)
	}
	return artifact, nil
}

// readTree returns all files of an artifact, as content of the source ref.
func (a *Artifacts) readTree(ctx context.Context, ref Reference, artifact Artifact) (Content, error) {
	content, err := a.fetchTree(ctx, ref, artifact)
	if err != nil {
		return Content{}, fmt.Errorf("%s: artifact %s: %w", ref, redacted(artifact.URL), err)
	}
	content.Reference, content.Template, content.Lua, content.Version = ref, artifact.IsTemplate, artifact.IsLua, artifact.Version()
	return content, nil
}

// selectManifests returns content with only the manifests at or below directory, see isManifest. It fails with
// phase.TerminalError if there are none.
func selectManifests(content Content, directory string) (Content, error) {
	files, err := filesBelow(content, directory)
	if err != nil {
		return Content{}, err
	}
	manifests := map[string][]byte{}
	for _, file := range files {
		if isManifest(file.Name) {
			manifests[file.Name] = file.Data
		}
	}
	if len(manifests) == 0 {
		// To deploy nothing would delete everything.
		return Content{}, phase.TerminalErrorf("%s has no file that ends in .yaml, .yml or .json%s", content.Reference, belowText(directory))
	}
	if len(manifests) < len(content.Files) {
		selected := newContent(content.Reference, manifests)
		content.Files, content.Digest = selected.Files, selected.Digest
	}
	return content, nil
}

// belowText returns the part of a message that names a directory, "" for the root.
func belowText(directory string) string {
	if directory == "." {
		return ""
	}
	return fmt.Sprintf(" below %q", directory)
}

// cleanDirectory returns the clean path of a directory in a source, "." for the root.
func cleanDirectory(ref Reference, directory string) (string, error) {
	directory = cmp.Or(strings.Trim(directory, "/"), ".")
	if directory = path.Clean(directory); directory == "." {
		return directory, nil
	}
	clean, err := archive.CleanPath(directory)
	if err != nil {
		return "", phase.TerminalErrorf("%s: path %w", ref, err)
	}
	return clean, nil
}

// filesBelow returns the files at or below directory, a clean path of a directory or of one file. It fails with
// phase.TerminalError if there are none.
func filesBelow(content Content, directory string) ([]File, error) {
	if directory == "." {
		return content.Files, nil
	}
	var below []File
	for _, file := range content.Files {
		if file.Name == directory || strings.HasPrefix(file.Name, directory+"/") {
			below = append(below, file)
		}
	}
	if len(below) == 0 {
		return nil, phase.TerminalErrorf("%s has no directory %q", content.Reference, directory)
	}
	return below, nil
}
