package source

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/Masterminds/semver/v3"
	"helm.sh/helm/v4/pkg/chart/common"
	helmchart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/phase"
)

// IsFluxURL returns whether the repositoryURL of a chart is a Flux source.
func IsFluxURL(address string) bool {
	_, ok := fluxKindOf(address)
	return ok
}

// fluxKindOf returns the kind for the scheme of a repositoryURL.
func fluxKindOf(address string) (kind string, ok bool) {
	scheme, _, _ := strings.Cut(address, "://")
	for _, kind := range FluxKinds() {
		if strings.ToLower(kind) == scheme {
			return kind, true
		}
	}
	return "", false
}

// ResolveChartSource returns the Flux source of a chart and the path of the chart's directory in it, for a
// repositoryURL like gitrepository://<namespace>/<name>/<path>. It returns the zero Reference for any other URL. All
// errors are phase.TerminalError, for example if TemplateContext.RestrictedNamespace does not allow the namespace.
func ResolveChartSource(chart configv1beta1.HelmChart, tmplCtx TemplateContext) (ref Reference, directory string, err error) {
	address, err := tmplCtx.Expand("repositoryURL", chart.RepositoryURL)
	if err != nil {
		return Reference{}, "", err
	}
	kind, ok := fluxKindOf(address)
	if !ok {
		return Reference{}, "", nil
	}
	_, rest, _ := strings.Cut(address, "://")
	parts := append(strings.SplitN(rest, "/", 3), "", "")
	if parts[0] == "" || parts[1] == "" {
		return Reference{}, "", phase.TerminalErrorf("repositoryURL %q is not %s://<namespace>/<name>/<path>", address, strings.ToLower(kind))
	}
	ref, err = expandReference(Reference{Kind: kind, Namespace: parts[0], Name: parts[1]}, tmplCtx)
	return ref, parts[2], err
}

// Package returns the archive of the chart in a directory of a Flux source, like `helm package`: without the files in
// .helmignore, and with the dependencies in its directory charts. The archive is deterministic. An error about the
// chart contains the directory and is phase.TerminalError: only another artifact, or a change of the profile, corrects
// it.
func (c *Charts) Package(ctx context.Context, chart configv1beta1.HelmChart, artifacts *Artifacts, tmplCtx TemplateContext) (Chart, error) {
	ref, directory, err := ResolveChartSource(chart, tmplCtx)
	if err != nil {
		return Chart{}, err
	}
	if directory, err = cleanDirectory(ref, directory); err != nil {
		return Chart{}, err
	}
	artifact, err := artifacts.findArtifact(ctx, ref)
	if err != nil {
		return Chart{}, err
	}
	request := chartRequest{repositoryURL: chart.RepositoryURL, name: directory, version: artifact.Digest}
	packaged, err, _ := c.flights.Do("package "+request.key(), func() (any, error) {
		if cached, ok := c.cached(request); ok {
			return cached, nil
		}
		tree, err := artifacts.readTree(ctx, ref, artifact)
		if err != nil {
			return Chart{}, err
		}
		files, err := filesBelow(tree, directory)
		if err != nil {
			return Chart{}, err
		}
		got, err := c.packageChart(files, directory)
		if err != nil {
			return Chart{}, fmt.Errorf("%s: chart in %q: %w", ref, directory, err)
		}
		return c.store(request, got)
	})
	if err != nil {
		return Chart{}, err
	}
	found := packaged.(Chart)
	found.Source, found.Artifact = ref, artifact.Version()
	return found, checkVersion(chart, found)
}

// checkVersion returns an error if the chartVersion of the profile does not allow the version of a packaged chart.
func checkVersion(chart configv1beta1.HelmChart, packaged Chart) error {
	if chart.ChartVersion == "" {
		return nil
	}
	constraint, err := semver.NewConstraint(chart.ChartVersion)
	if err != nil {
		return phase.TerminalErrorf("chartVersion %q: %w", chart.ChartVersion, err)
	}
	version, err := semver.NewVersion(packaged.Version)
	if err != nil || !constraint.Check(version) {
		return phase.TerminalErrorf("%s has chart %s %s, and the profile wants chartVersion %s", chart.RepositoryURL, packaged.Name, packaged.Version, chart.ChartVersion)
	}
	return nil
}

// packageChart returns the archive of the chart in files, which are below directory. See Package.
func (c *Charts) packageChart(files []File, directory string) (downloadedChart, error) {
	workDir, err := os.MkdirTemp(c.dir, packagePrefix)
	if err != nil {
		return downloadedChart{}, withoutPath(err)
	}
	defer os.RemoveAll(workDir) //nolint:errcheck // the next start of a hub deletes the rest
	if err := writeFiles(workDir, files, directory); err != nil {
		return downloadedChart{}, err
	}
	if _, err := os.Stat(filepath.Join(workDir, "Chart.yaml")); err != nil {
		return downloadedChart{}, phase.TerminalErrorf("it has no Chart.yaml")
	}
	c.parsing.Lock()
	defer c.parsing.Unlock()
	limits := newChartLimits()
	for _, file := range files {
		if err := limits.addFile(strings.TrimPrefix(file.Name, directory+"/"), file.Data, 0); err != nil {
			return downloadedChart{}, phase.TerminalError{Err: err}
		}
	}
	// Helm's loader honours .helmignore, and refuses a chart that is not valid.
	loaded, err := loader.LoadDir(workDir)
	if err := checkLoaded(loaded, err); err != nil {
		return downloadedChart{}, phase.TerminalError{Err: err}
	}
	if missing := missingDependencies(loaded); len(missing) > 0 {
		return downloadedChart{}, phase.TerminalErrorf("its dependencies are not in its directory charts: %s", strings.Join(missing, ", "))
	}
	archived, err := archiveChart(loaded)
	return downloadedChart{archive: archived, metadata: loaded.Metadata}, err
}

// missingDependencies returns the names of the dependencies in Chart.yaml that the chart does not contain.
func missingDependencies(loaded *helmchart.Chart) []string {
	var missing []string
	for _, dependency := range loaded.Metadata.Dependencies {
		isSame := func(c *helmchart.Chart) bool { return c.Name() == dependency.Name }
		if !slices.ContainsFunc(loaded.Dependencies(), isSame) {
			missing = append(missing, dependency.Name)
		}
	}
	return missing
}

// writeFiles writes the files below a directory of a source to an empty directory.
func writeFiles(workDir string, files []File, directory string) error {
	for _, file := range files {
		path := filepath.Join(workDir, filepath.FromSlash(strings.TrimPrefix(file.Name, directory+"/")))
		err := os.MkdirAll(filepath.Dir(path), 0o700)
		if err == nil {
			err = os.WriteFile(path, file.Data, 0o600)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file.Name, withoutPath(err))
		}
	}
	return nil
}

// archiveChart returns the files of a chart as a gzipped tar archive. It is deterministic: sorted and without times.
func archiveChart(loaded *helmchart.Chart) ([]byte, error) {
	files := slices.SortedFunc(slices.Values(loaded.Raw), func(a, b *common.File) int { return cmp.Compare(a.Name, b.Name) })
	var archived bytes.Buffer
	zipped := gzip.NewWriter(&archived)
	writer := tar.NewWriter(zipped)
	for _, file := range files {
		header := &tar.Header{Typeflag: tar.TypeReg, Name: loaded.Name() + "/" + file.Name, Mode: 0o644, Size: int64(len(file.Data))}
		if err := writer.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := writer.Write(file.Data); err != nil {
			return nil, err
		}
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}
	if err := zipped.Close(); err != nil {
		return nil, err
	}
	return archived.Bytes(), nil
}
