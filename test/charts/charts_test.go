package charts

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"helm.sh/helm/v4/pkg/chart/v2/loader"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

const (
	// archivesVariable is the environment variable with a directory of packaged charts. Optional files beside
	// NAME-VERSION.tgz are NAME-VERSION.yaml, the values of the installation, and NAME-VERSION.upgrade.yaml, the values of
	// the upgrade. Without the latter, the upgrade changes a value of the chart that changes its manifest.
	archivesVariable = "TOWLINE_CHARTS"
	// modeVariable is the environment variable with push or pull. Without it each chart is deployed in both modes.
	modeVariable = "TOWLINE_CHARTS_MODE"
	// namespace is the namespace of every release.
	namespace = "compared"
)

// TestCharts deploys each chart archive of a directory with a ClusterProfile to a member, upgrades and uninstalls it,
// and compares each step with the real helm: in push mode, and then in pull mode with the agent as a process. The
// charts of a mode share a member, which is emptied between them and replaced after a failure. Examples:
//
//	TOWLINE_CHARTS=$HOME/charts go test -v -count 1 -timeout 2h ./test/charts
//	TOWLINE_CHARTS=$HOME/charts go test -v -count 1 -run 'TestCharts/pull/kyverno' ./test/charts
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
	var results table
	for _, mode := range []string{"push", "pull"} {
		if only := os.Getenv(modeVariable); only != "" && only != mode {
			continue
		}
		t.Run(mode, func(t *testing.T) {
			var m *member
			for _, archive := range archives {
				if m == nil {
					m = h.newMember(t, mode)
				}
				succeeded := t.Run(strings.TrimSuffix(filepath.Base(archive), ".tgz"), func(t *testing.T) {
					c := newComparison(t, h, m, archive)
					defer results.add(c)
					c.run()
				})
				if !succeeded || !m.deleteLeftovers(t) {
					h.removeMember(t, m)
					m = nil
				}
			}
		})
	}
	t.Logf("\n%s", results.String())
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

// comparison is the deployment of one chart in one mode.
type comparison struct {
	*testing.T
	hub           *hub
	archive, base string
	member        *member
	chart, at     string // name and version
	profile       string
	defaults      map[string]any // the values of the chart
	values        string         // YAML
	crds          objects        // of the crds directories
	apis          []string       // API versions for `helm template`
	random        paths

	row row
}

func newComparison(t *testing.T, h *hub, m *member, archive string) *comparison {
	t.Helper()
	chart, err := loader.LoadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	base := strings.TrimSuffix(archive, ".tgz")
	c := &comparison{
		T: t, hub: h, archive: archive, base: base, member: m, chart: chart.Name(), at: chart.Metadata.Version, defaults: chart.Values,
		profile: strings.ToLower(strings.ReplaceAll(m.mode+"-"+filepath.Base(base), "+", "-")),
	}
	c.row = row{chart: c.chart, version: c.at, mode: m.mode}
	if raw, err := os.ReadFile(base + ".yaml"); err == nil {
		c.values = string(raw)
		c.addNote("values: %s", strings.Join(strings.Fields(filepath.Base(base+".yaml")), " "))
	}
	return c
}

func (c *comparison) addNote(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	c.Logf("note: %s", text)
	if !slices.Contains(c.row.notes, text) {
		c.row.notes = append(c.row.notes, text)
	}
}

// reportDifferences reports differences. It returns yes with the number of objects, or no with the number of
// differences.
func (c *comparison) reportDifferences(step string, differences []string, objects int) string {
	switch {
	case len(differences) > 0:
		c.Errorf("%s: %d differences:\n  %s", step, len(differences), strings.Join(differences, "\n  "))
		return fmt.Sprintf("no (%d differences)", len(differences))
	case objects == 0:
		return "none"
	}
	return fmt.Sprintf("yes (%d)", objects)
}

func (c *comparison) run() {
	began := time.Now()
	defer func() { c.Logf("took %.0f s", time.Since(began).Seconds()) }()
	before := c.readInventory()
	want := c.render(c.values, false)
	c.random = c.randomPaths(want)
	deployed := time.Now()
	c.deploy(c.values)
	if problem := c.hub.awaitProvisioned(c.member); problem != "" {
		c.deleteRelease(before, want)
		c.reportFailure(problem)
		return
	}
	c.addNote("deployed in %.1f s", time.Since(deployed).Seconds())
	differences, hooks := c.compare(want)
	c.row.objects = c.reportDifferences("objects after install", differences, len(want.manifest)+len(want.crds))
	c.row.hooks = c.reportDifferences("hooks after install", append(hooks, c.failedHooks("install")...), len(want.hooks))
	c.checkRevision(1)
	want = c.upgradeRelease(want)
	c.deleteRelease(before, want)
}

// reportFailure reports that the chart is not deployed: as a failure, unless helm cannot install it either.
func (c *comparison) reportFailure(problem string) {
	c.Helper()
	file := filepath.Join(c.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(c.values), 0o600); err != nil {
		c.Fatal(err)
	}
	_, err := run(c.Context(), c.member.plane, "", "helm", "install", c.chart, c.archive, "-n", namespace, "--create-namespace", "-f", file)
	if err == nil {
		c.row.objects = "not deployed"
		c.Errorf("not provisioned, but helm installs it: %s", problem)
		return
	}
	c.row.objects = "helm fails, too"
	c.addNote("towline: %s", problem)
	c.addNote("helm: %s", err)
	_, err = run(c.Context(), c.member.plane, "", "helm", "uninstall", c.chart, "-n", namespace, "--ignore-not-found", "--no-hooks")
	if err != nil {
		c.addNote("helm: %s", err)
	}
}

// readInventory reads the member and returns its inventory.
func (c *comparison) readInventory() map[string]bool {
	c.Helper()
	c.member.mapper.Reset()
	before := c.member.inventory(c.T)
	crds, err := c.decode(mustRun(c.T, c.member.plane, "helm", "show", "crds", c.archive))
	if err != nil {
		c.Fatal(err)
	}
	if c.apis, err = c.apiVersions(crds); err != nil {
		c.Fatal(err)
	}
	c.crds = crds
	return before
}

// checkRevision makes the hub reconcile the summary again and reports additional revisions.
func (c *comparison) checkRevision(want int) {
	c.Helper()
	c.hub.changeLabel(c.T, c.member)
	var revisions []int
	got := 0
	await(settleTime, func() string {
		revisions = c.revisions()
		if got = revisions[len(revisions)-1]; got > want {
			return ""
		}
		return "no other revision yet"
	})
	if !strings.HasPrefix(c.row.revisions, "no") {
		c.row.revisions = fmt.Sprintf("yes (%d)", got)
	}
	if got != want {
		c.row.revisions = fmt.Sprintf("no (%d, not %d)", got, want)
		c.Errorf("want revision %d, got %v", want, revisions)
		c.explainRevision(revisions)
	}
}

// revisions returns the revisions that have a record, oldest first.
func (c *comparison) revisions() []int {
	c.Helper()
	list, err := c.member.metadata.Resource(secrets()).Namespace(namespace).List(c.Context(), metav1.ListOptions{
		LabelSelector: "owner=helm,name=" + c.chart,
	})
	if err != nil || len(list.Items) == 0 {
		c.Fatalf("release records %v, %v", list, err)
	}
	var revisions []int
	for i := range list.Items {
		revision, err := strconv.Atoi(list.Items[i].Labels["version"])
		if err != nil {
			c.Fatal(err)
		}
		revisions = append(revisions, revision)
	}
	slices.Sort(revisions)
	return revisions
}

// explainRevision logs the differences of the last two revisions.
func (c *comparison) explainRevision(revisions []int) {
	c.Helper()
	var manifests []objects
	for _, r := range revisions[max(0, len(revisions)-2):] {
		manifest := mustRun(c.T, c.member.plane, "helm", "get", "manifest", "-n", namespace, c.chart, "--revision", strconv.Itoa(r))
		found, err := c.decode(manifest)
		if err != nil {
			c.Fatal(err)
		}
		manifests = append(manifests, found)
	}
	if len(manifests) == 2 {
		c.Logf("the last two manifests differ:\n  %s", strings.Join(differences(manifests[0], manifests[1], nil), "\n  "))
	}
}

// upgradeRelease upgrades the release to other values, if there are any that change the manifest.
func (c *comparison) upgradeRelease(installed rendering) rendering {
	values, what := c.changedValues()
	if values == "" {
		c.row.upgrade = "no value to change"
		return installed
	}
	c.deploy(values)
	problem := c.member.awaitRevision(c.T, c.chart, 2, deployLimit)
	if problem == "" {
		problem = c.hub.awaitProvisioned(c.member)
	}
	if problem != "" {
		c.row.upgrade = "failed"
		features, _, err := c.hub.summaries(c.member)
		c.Errorf("upgrade with %s: %s; summary %+v, %v", what, problem, features, err)
		return installed
	}
	want := c.render(values, true)
	differences, hooks := c.compare(want)
	c.row.upgrade = c.reportDifferences("upgrade with "+what, slices.Concat(differences, hooks, c.failedHooks("upgrade")), len(want.manifest)+len(want.crds))
	c.checkRevision(2)
	if len(want.manifest) < len(installed.manifest) {
		want.manifest = installed.manifest
	}
	return want
}

// changedValues returns values for an upgrade, and the name of the change.
func (c *comparison) changedValues() (values, what string) {
	if raw, err := os.ReadFile(c.base + ".upgrade.yaml"); err == nil {
		return string(raw), filepath.Base(c.base) + ".upgrade.yaml"
	}
	unchanged := c.render(c.values, true)
	for _, candidate := range candidates(c.defaults) {
		changed := map[string]any{}
		if err := yaml.Unmarshal([]byte(c.values), &changed); err != nil {
			c.Fatal(err)
		}
		setValue(changed, candidate.path, candidate.value)
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

// deleteRelease deletes the profile and reports the objects that are left on the member.
func (c *comparison) deleteRelease(before map[string]bool, want rendering) {
	c.hub.deleteProfile(c.T, c.profile)
	if problem := c.hub.awaitNoSummaries(c.member, deployLimit); problem != "" {
		c.row.uninstall = "failed"
		c.Errorf("uninstall: %s", problem)
		return
	}
	c.row.uninstall, c.row.remainder = "yes", "none"
	if left := c.member.awaitRemoved(c.T, before, want); len(left) > 0 {
		c.row.remainder = fmt.Sprintf("%d objects", len(left))
		c.Errorf("left after uninstall: %d objects that helm does not leave:\n  %s", len(left), strings.Join(left, "\n  "))
	}
}
