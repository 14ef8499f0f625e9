package charts

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"sigs.k8s.io/yaml"
)

const (
	// archivesVariable names a directory with packaged charts. Beside NAME-VERSION.tgz may be NAME-VERSION.yaml, the values to install with, and
	// NAME-VERSION.upgrade.yaml, the values to upgrade to. Without the latter a value of the chart is changed that changes its manifest.
	archivesVariable = "TOWLINE_CHARTS"
	// modeVariable is push (the default) or pull.
	modeVariable = "TOWLINE_CHARTS_MODE"
	// namespace is that of every release.
	namespace = "compared"
)

// TestCharts deploys each chart archive of a directory with a ClusterProfile to a member of its own, upgrades and uninstalls it, and compares
// each step with the real helm. Example:
//
//	TOWLINE_CHARTS=$HOME/charts go test -v -count 1 -timeout 2h ./test/charts
func TestCharts(t *testing.T) {
	dir := os.Getenv(archivesVariable)
	if dir == "" {
		t.Skipf("%s names no directory with chart archives", archivesVariable)
	}
	archives, err := filepath.Glob(filepath.Join(dir, "*.tgz"))
	if err != nil || len(archives) == 0 {
		t.Fatalf("chart archives in %s: %q, %v", dir, archives, err)
	}
	h := newHub(t, archives)
	var table strings.Builder
	table.WriteString("| chart | objects | hooks | upgrade | uninstall | notes |\n|---|---|---|---|---|---|\n")
	for _, archive := range archives {
		name := strings.TrimSuffix(filepath.Base(archive), ".tgz")
		t.Run(name, func(t *testing.T) {
			before := time.Now()
			defer func() { t.Logf("took %.0f s", time.Since(before).Seconds()) }()
			c := &comparison{T: t, hub: h, archive: archive, base: strings.TrimSuffix(archive, ".tgz")}
			defer func() { fmt.Fprintf(&table, "| %s | %s |\n", name, strings.Join(c.results(), " | ")) }()
			c.run()
		})
	}
	t.Logf("\n%s", table.String())
}

// serve serves the archives as a Helm repository.
func serve(t *testing.T, archives []string) string {
	t.Helper()
	entries := map[string][]map[string]any{}
	content := map[string][]byte{}
	for _, archive := range archives {
		chart, err := loader.LoadFile(archive)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(archive)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Base(archive)
		content["/"+file] = raw
		entries[chart.Name()] = append(entries[chart.Name()], map[string]any{
			"apiVersion": chart.Metadata.APIVersion, "name": chart.Name(), "version": chart.Metadata.Version, "urls": []string{file},
		})
	}
	index, err := yaml.Marshal(map[string]any{"apiVersion": "v1", "entries": entries})
	if err != nil {
		t.Fatal(err)
	}
	content["/index.yaml"] = index
	server := httptest.NewServer(fileServer(content))
	t.Cleanup(server.Close)
	return server.URL
}

// comparison is what happens with one chart.
type comparison struct {
	*testing.T
	hub           *hub
	archive, base string
	member        *member
	chart, at     string // name and version
	values        string // YAML
	random        bool   // two renderings differ
	upgraded      bool   // to other values

	objects, hooks, upgrade, uninstall string
	notes                              []string
}

func (c *comparison) results() []string {
	return []string{c.objects, c.hooks, c.upgrade, c.uninstall, strings.Join(c.notes, "; ")}
}

func (c *comparison) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.Logf("note: %s", text)
	if !slices.Contains(c.notes, text) {
		c.notes = append(c.notes, text)
	}
}

// judge returns yes, or no after the differences are reported.
func (c *comparison) judge(step string, differences []string) string {
	if len(differences) == 0 {
		return "yes"
	}
	c.Errorf("%s: %d differences:\n  %s", step, len(differences), strings.Join(differences, "\n  "))
	return fmt.Sprintf("no (%d)", len(differences))
}

func (c *comparison) run() {
	c.objects, c.hooks, c.upgrade, c.uninstall = "-", "-", "-", "-"
	chart, err := loader.LoadFile(c.archive)
	if err != nil {
		c.Fatal(err)
	}
	c.chart, c.at = chart.Name(), chart.Metadata.Version
	if raw, err := os.ReadFile(c.base + ".yaml"); err == nil {
		c.values = string(raw)
	}
	c.member = c.hub.newMember(c.T, c.chart)
	before := c.member.inventory(c.T)
	want := c.render(c.values, false)
	c.random = c.isRandom()
	began := time.Now()
	c.deploy(c.values)
	if problem := c.hub.await(c.member, 3*time.Minute); problem != "" {
		c.objects = "not deployed"
		c.Errorf("not provisioned: %s", problem)
		c.delete(before, want)
		return
	}
	c.note("%d objects, %d hooks, deployed in %.1f s", len(want.manifest), len(want.hooks), time.Since(began).Seconds())
	differences, hooks := c.compare(want)
	c.objects = c.judge("objects after install", differences)
	c.hooks = c.judge("hooks after install", append(hooks, c.hooksRun("install")...))
	if len(want.hooks) == 0 && len(hooks) == 0 {
		c.hooks = "none"
	}
	want = c.change(chart.Values, want)
	c.checkRevision()
	c.delete(before, want)
}

// checkRevision reports revisions that nothing has asked for.
func (c *comparison) checkRevision() {
	c.Helper()
	want := 1
	if c.upgraded {
		want = 2
	}
	history := must(c.T, c.member.plane, "helm", "history", "-n", namespace, c.chart)
	if got := strings.Count(strings.TrimSpace(history), "\n"); got != want {
		c.Errorf("want %d revisions:\n%s", want, history)
		c.explainRevision()
	}
}

// explainRevision logs how the last two revisions differ.
func (c *comparison) explainRevision() {
	c.Helper()
	var revisions []struct {
		Revision int `json:"revision"`
	}
	if err := yaml.Unmarshal([]byte(must(c.T, c.member.plane, "helm", "history", "-n", namespace, c.chart, "-o", "json")), &revisions); err != nil {
		c.Fatal(err)
	}
	var manifests []objects
	for _, r := range revisions[max(0, len(revisions)-2):] {
		found, err := c.decode(must(c.T, c.member.plane, "helm", "get", "manifest", "-n", namespace, c.chart, "--revision", fmt.Sprint(r.Revision)))
		if err != nil {
			c.Fatal(err)
		}
		manifests = append(manifests, found)
	}
	if len(manifests) == 2 {
		c.Logf("the last two manifests differ:\n  %s", strings.Join(differences(manifests[0], manifests[1], false), "\n  "))
	}
}

// change upgrades the release to other values, if there are any that change the manifest.
func (c *comparison) change(defaults map[string]any, installed rendering) rendering {
	values, what := c.changedValues(defaults)
	if values == "" {
		c.upgrade = "no value to change"
		return installed
	}
	c.deploy(values)
	c.upgraded = true
	if problem := c.member.awaitRevision(c.T, c.chart, 2, 3*time.Minute); problem != "" {
		c.upgrade = "failed"
		c.Errorf("upgrade with %s: %s", what, problem)
		return installed
	}
	if problem := c.hub.await(c.member, time.Minute); problem != "" {
		c.upgrade = "failed"
		c.Errorf("upgrade with %s: %s", what, problem)
		return installed
	}
	want := c.render(values, true)
	differences, hooks := c.compare(want)
	c.upgrade = c.judge("upgrade with "+what, slices.Concat(differences, hooks, c.hooksRun("upgrade")))
	if len(want.manifest) < len(installed.manifest) {
		want.manifest = installed.manifest
	}
	return want
}

// changedValues returns values for an upgrade, and what they change.
func (c *comparison) changedValues(defaults map[string]any) (values, what string) {
	if raw, err := os.ReadFile(c.base + ".upgrade.yaml"); err == nil {
		return string(raw), filepath.Base(c.base) + ".upgrade.yaml"
	}
	unchanged := c.render(c.values, true)
	for _, candidate := range candidates(defaults) {
		changed := map[string]any{}
		if err := yaml.Unmarshal([]byte(c.values), &changed); err != nil {
			c.Fatal(err)
		}
		set(changed, candidate.path, candidate.value)
		raw, err := yaml.Marshal(changed)
		if err != nil {
			c.Fatal(err)
		}
		want, err := c.tryRender(string(raw), true)
		if err == nil && len(differences(unchanged.manifest, want.manifest, c.random)) > 0 {
			return string(raw), fmt.Sprintf("%s=%v", strings.Join(candidate.path, "."), candidate.value)
		}
	}
	return "", ""
}

// delete deletes the profile and reports what is left on the member.
func (c *comparison) delete(before map[string]bool, want rendering) {
	c.hub.deleteProfile(c.T, c.chart)
	if problem := c.hub.awaitGone(c.member, 3*time.Minute); problem != "" {
		c.uninstall = "failed"
		c.Errorf("uninstall: %s", problem)
		return
	}
	left := c.member.awaitClean(c.T, before, want)
	c.uninstall = c.judge("left after uninstall", left)
}
