package render

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/kustomize/api/konfig"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/resource"
	"sigs.k8s.io/kustomize/api/types"

	"github.com/towline/towline/internal/archive"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
)

// kustomizationInput is the input of buildFunction.
type kustomizationInput struct {
	Path       string
	Components []string
	Namespace  string
	// Archive holds the files, and ArchiveName is its key in the ConfigMap or Secret. Without an archive, Names are the
	// names of the files, and a callback with a name returns the content of the file.
	ArchiveName string
	Archive     []byte
	Names       []string
}

// kustomizationOutput is the output of buildFunction: the objects as a JSON list, and, by index, the YAML of the
// objects that contain "{{".
type kustomizationOutput struct {
	Objects   json.RawMessage
	Templates map[int]string
}

// managedBy is the value of the label for buildMetadata: [managedByLabel]. The value of the library is not a valid
// label, since the library has no version.
const managedBy = "kustomize-v5.8.1"

// maxBuildOutput is the maximum size of the objects of a build in bytes. The hub decodes them.
const maxBuildOutput = 16 << 20

// maxBuildMessage is the maximum length of an error of kustomize, which can contain whole files, in bytes.
const maxBuildMessage = 1 << 10

// maxKustomizationArchive limits the unpacked archive of a ConfigMap or Secret, which has less than 1 MiB itself.
func maxKustomizationArchive() archive.Limits { return archive.Limits{Files: 10_000, Size: 32 << 20} }

// buildInSandbox is buildFunction in a child of the sandbox.
func buildInSandbox(input json.RawMessage, callBack func(any) (json.RawMessage, error)) (any, error) {
	var k kustomizationInput
	if err := json.Unmarshal(input, &k); err != nil {
		return nil, err
	}
	tree, err := k.newTree(callBack)
	if err != nil {
		return nil, phase.TerminalError{Err: err}
	}
	return tree.build(k)
}

// newTree returns the files of the source.
func (k kustomizationInput) newTree(callBack func(any) (json.RawMessage, error)) (*sourceTree, error) {
	read := func(name string) ([]byte, error) {
		raw, err := callBack(name)
		if err != nil {
			return nil, err
		}
		var content []byte
		err = json.Unmarshal(raw, &content)
		return content, err
	}
	names := k.Names
	if k.ArchiveName != "" {
		files, err := archive.Read(k.Archive, maxKustomizationArchive())
		if err != nil {
			return nil, fmt.Errorf("key %s: %w", k.ArchiveName, err)
		}
		for name := range files {
			names = append(names, name)
		}
		read = func(name string) ([]byte, error) { return files[name], nil }
	}
	return newSourceTree(names, read), nil
}

// build builds a kustomization like `kubectl kustomize`. Unlike kubectl, it accepts files anywhere in the tree, as Flux
// does.
func (t *sourceTree) build(k kustomizationInput) (output kustomizationOutput, err error) {
	defer func() {
		if reason := recover(); reason != nil {
			output, err = kustomizationOutput{}, phase.TerminalErrorf("kustomize failed: %v", reason)
		}
	}()
	t.root = treePath(k.Path)
	addsManagedBy := false
	t.editRoot = func(root *types.Kustomization) {
		addsManagedBy = slices.Contains(root.BuildMetadata, types.ManagedByLabelOption)
		root.BuildMetadata = slices.DeleteFunc(root.BuildMetadata, func(option string) bool { return option == types.ManagedByLabelOption })
		root.Components = append(root.Components, k.Components...)
		if k.Namespace != "" {
			root.Namespace = k.Namespace
		}
	}
	if !t.IsDir(t.root) {
		return kustomizationOutput{}, phase.TerminalError{Err: errors.New("the directory does not exist")}
	}
	options := krusty.MakeDefaultOptions() // no plugins, no functions, no charts
	options.LoadRestrictions, options.Reorder = types.LoadRestrictionsNone, krusty.ReorderOptionUnspecified
	built, err := krusty.MakeKustomizer(options).Run(t, t.root)
	if t.refused != nil {
		return kustomizationOutput{}, phase.TerminalError{Err: t.refused}
	}
	if err != nil {
		return kustomizationOutput{}, phase.TerminalError{Err: errors.New(describeBuildError(err))}
	}
	return newKustomizationOutput(built.Resources(), addsManagedBy)
}

// newKustomizationOutput returns the objects of a build, with the label managedBy if addsManagedBy is true.
func newKustomizationOutput(resources []*resource.Resource, addsManagedBy bool) (kustomizationOutput, error) {
	objects, templates := make([]map[string]any, 0, len(resources)), map[int]string{}
	for i, built := range resources {
		if addsManagedBy {
			labels := map[string]string{konfig.ManagedbyLabelKey: managedBy}
			maps.Copy(labels, built.GetLabels())
			if err := built.SetLabels(labels); err != nil {
				return kustomizationOutput{}, phase.TerminalErrorf("%s %s: %s", built.GetKind(), built.GetName(), describeBuildError(err))
			}
		}
		text, err := built.AsYAML()
		if err != nil {
			return kustomizationOutput{}, phase.TerminalErrorf("%s %s: %s", built.GetKind(), built.GetName(), describeBuildError(err))
		}
		decoded, err := kube.DecodeManifest(text)
		if err == nil && len(decoded) != 1 {
			err = fmt.Errorf("it contains %d objects", len(decoded))
		}
		if err != nil {
			return kustomizationOutput{}, phase.TerminalErrorf("%s %s: %w", built.GetKind(), built.GetName(), err)
		}
		objects = append(objects, decoded[0].Object)
		if bytes.Contains(text, []byte("{{")) {
			templates[i] = string(text)
		}
	}
	raw, err := json.Marshal(objects)
	if err == nil && len(raw) > maxBuildOutput {
		err = phase.TerminalErrorf("the objects have more than %d MiB", maxBuildOutput>>20)
	}
	if err != nil {
		return kustomizationOutput{}, err
	}
	return kustomizationOutput{Objects: raw, Templates: templates}, nil
}

// describeBuildError returns the message of an error of kustomize in one line, with paths relative to the tree.
// Kustomize reads each resource as a file and then as a directory. The message has only one of these two errors.
func describeBuildError(err error) string {
	message := strings.NewReplacer(treeRoot+"/", "", treeRoot, ".").Replace(strings.Join(strings.Fields(err.Error()), " "))
	message = regexp.MustCompile(`accumulation err='accumulating resources from '[^']*': [^']* is not a file': `).ReplaceAllString(message, "")
	message = regexp.MustCompile(`accumulation err='(.*)': must build at directory: '[^']*': file is not directory`).ReplaceAllString(message, "$1")
	if len(message) > maxBuildMessage {
		message = strings.ToValidUTF8(message[:maxBuildMessage], "") + " ..."
	}
	return message
}
