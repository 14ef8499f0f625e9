package render

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/kustomize/api/konfig"
	"sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// treeRoot is the directory of the tree in the file system of a build. Nothing exists outside of it: a path with too
// many ".." names no file.
const treeRoot = "/@tree"

func treePath(name string) string { return path.Join(treeRoot, name) }

// sourceTree is the file system of a build: the files of one source, each of which is read when kustomize reads it. It
// rejects a kustomization with an entry outside of the tree, since kustomize would fetch it from the network.
type sourceTree struct {
	// FileSystem is empty. It implements the methods that a build does not use.
	filesys.FileSystem
	// isDir has the paths of all files (false) and directories (true).
	isDir map[string]bool
	read  func(name string) ([]byte, error)
	// root is the directory to build. editRoot edits its kustomization before the build; nil for no changes.
	root     string
	editRoot func(*types.Kustomization)
	// refused has the errors of rejected entries. Kustomize itself would report the kustomization as missing.
	refused error
}

func newSourceTree(names []string, read func(name string) ([]byte, error)) *sourceTree {
	tree := &sourceTree{FileSystem: filesys.MakeFsInMemory(), isDir: map[string]bool{treeRoot: true}, read: read}
	for _, name := range names {
		file := treePath(name)
		tree.isDir[file] = false
		for dir := path.Dir(file); !tree.isDir[dir]; dir = path.Dir(dir) {
			tree.isDir[dir] = true
		}
	}
	return tree
}

// Exists implements filesys.FileSystem.
func (t *sourceTree) Exists(name string) bool {
	_, exists := t.isDir[path.Clean(name)]
	return exists
}

// IsDir implements filesys.FileSystem.
func (t *sourceTree) IsDir(name string) bool { return t.isDir[path.Clean(name)] }

// CleanedAbs implements filesys.FileSystem.
func (t *sourceTree) CleanedAbs(name string) (filesys.ConfirmedDir, string, error) {
	name = path.Clean(name)
	switch {
	case !t.Exists(name):
		return "", "", fmt.Errorf("%s does not exist", name)
	case t.IsDir(name):
		return filesys.ConfirmedDir(name), "", nil
	}
	return filesys.ConfirmedDir(path.Dir(name)), path.Base(name), nil
}

// ReadFile implements filesys.FileSystem.
func (t *sourceTree) ReadFile(name string) ([]byte, error) {
	name = path.Clean(name)
	if !t.Exists(name) || t.IsDir(name) {
		return nil, fmt.Errorf("%s is not a file", name)
	}
	relative := strings.TrimPrefix(name, treeRoot+"/")
	content, err := t.read(relative)
	if err != nil {
		return nil, err
	}
	if !slices.Contains(konfig.RecognizedKustomizationFileNames(), path.Base(name)) {
		return content, nil
	}
	return t.readKustomization(relative, content)
}

// readKustomization checks the entries of a kustomization. It returns the edited content for the kustomization of root,
// and content for all others.
func (t *sourceTree) readKustomization(name string, content []byte) ([]byte, error) {
	var k types.Kustomization
	if k.Unmarshal(content) != nil {
		return content, nil //nolint:nilerr // kustomize returns the error
	}
	directory := path.Dir(treePath(name))
	isEdited := directory == t.root && t.editRoot != nil
	if isEdited {
		t.editRoot(&k)
	}
	if err := t.checkEntries(directory, k); err != nil {
		t.refused = errors.Join(t.refused, fmt.Errorf("%s: %w", name, err))
		return nil, t.refused
	}
	if !isEdited {
		return content, nil
	}
	return yaml.Marshal(k)
}

// checkEntries returns an error if an entry is not in the tree.
func (t *sourceTree) checkEntries(directory string, k types.Kustomization) error {
	k.FixKustomization()
	if len(k.HelmCharts) > 0 || k.HelmGlobals != nil {
		return errors.New("helmCharts: kustomizations with charts are not built; deploy the chart with spec.helmCharts of the profile")
	}
	for _, entry := range k.Resources {
		if err := t.checkEntry("resources", directory, entry, false); err != nil {
			return err
		}
	}
	for _, entry := range k.Components {
		if err := t.checkEntry("components", directory, entry, true); err != nil {
			return err
		}
	}
	others := otherEntries(k)
	for _, field := range slices.Sorted(maps.Keys(others)) {
		isRemote := isURL
		if slices.Contains([]string{"generators", "transformers", "validators"}, field) {
			// These can be repositories, too. An entry with a colon and a space is inline YAML.
			isRemote = func(entry string) bool {
				return isURL(entry) || !t.Exists(path.Join(directory, entry)) && !strings.Contains(entry, ": ") && isRepository(entry)
			}
		}
		if i := slices.IndexFunc(others[field], isRemote); i >= 0 {
			return remoteError(field, others[field][i])
		}
	}
	return nil
}

// checkEntry returns an error if an entry is neither a file nor a directory in the tree. A directory must neither be
// nor contain the directory of the kustomization.
func (t *sourceTree) checkEntry(field, directory, entry string, mustBeDirectory bool) error {
	target := path.Join(directory, entry)
	switch {
	case isURL(entry), !t.Exists(target) && isRepository(entry):
		return remoteError(field, entry)
	case path.IsAbs(entry), target != treeRoot && !strings.HasPrefix(target, treeRoot+"/"):
		return fmt.Errorf("%s: %q is outside of the source", field, entry)
	case !t.Exists(target):
		return fmt.Errorf("%s: %q does not exist in the source", field, entry)
	case mustBeDirectory && !t.IsDir(target):
		return fmt.Errorf("%s: %q is not a directory", field, entry)
	case t.IsDir(target) && strings.HasPrefix(directory+"/", target+"/"):
		return fmt.Errorf("%s: %q contains the kustomization itself: a cycle", field, entry)
	}
	return nil
}

func remoteError(field, entry string) error {
	return fmt.Errorf("%s: %q is remote, and a kustomization is built without a network: add it to the source", field, entry)
}

// isURL returns whether an entry is a URL. The entry can be inline YAML.
func isURL(entry string) bool {
	parsed, err := url.Parse(entry)
	return err == nil && parsed.Scheme != "" && strings.HasPrefix(entry[len(parsed.Scheme):], "://")
}

// isRepository returns whether an entry that does not exist looks like a Git repository.
func isRepository(entry string) bool {
	if strings.HasPrefix(entry, "git@") || strings.HasPrefix(entry, "git::") || strings.Contains(entry, "?ref=") || strings.Contains(entry, ".git") {
		return true
	}
	host, _, _ := strings.Cut(entry, "/")
	return slices.Contains([]string{"github.com", "gitlab.com", "bitbucket.org", "dev.azure.com"}, strings.ToLower(host))
}

// otherEntries returns, by field, the paths in a kustomization except resources and components.
func otherEntries(k types.Kustomization) map[string][]string {
	entries := map[string][]string{
		"crds": k.Crds, "configurations": k.Configurations, "generators": k.Generators, "transformers": k.Transformers,
		"validators": k.Validators, "openapi": {k.OpenAPI["path"]},
	}
	for _, patch := range slices.Concat(k.Patches, k.PatchesJson6902) { //nolint:staticcheck // users have deprecated fields
		entries["patches"] = append(entries["patches"], patch.Path)
	}
	for _, patch := range k.PatchesStrategicMerge { //nolint:staticcheck // see above
		entries["patchesStrategicMerge"] = append(entries["patchesStrategicMerge"], string(patch))
	}
	for _, replacement := range k.Replacements {
		entries["replacements"] = append(entries["replacements"], replacement.Path)
	}
	for _, generator := range k.ConfigMapGenerator {
		entries["configMapGenerator"] = append(entries["configMapGenerator"], generatorPaths(generator.KvPairSources)...)
	}
	for _, generator := range k.SecretGenerator {
		entries["secretGenerator"] = append(entries["secretGenerator"], generatorPaths(generator.KvPairSources)...)
	}
	return entries
}

// generatorPaths returns the paths of the files of a generator, without the keys in "key=path".
func generatorPaths(sources types.KvPairSources) []string {
	paths := slices.Clone(sources.EnvSources)
	for _, file := range sources.FileSources {
		_, name, hasKey := strings.Cut(file, "=")
		if !hasKey {
			name = file
		}
		paths = append(paths, name)
	}
	return paths
}
