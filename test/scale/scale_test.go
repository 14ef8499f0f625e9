package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestScenarios runs all scenarios with few clusters. It checks that they end and that each prints figures, and judges
// none of the times.
func TestScenarios(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := command(t.Context(), []string{
		"--clusters=3", "--namespace=fleet", "--profiles=2", "--outage=2s", "--idle=2s", "--matrix-profiles=3", "--matrix-clusters=2", "--fill-profiles=5", "--timeout=2m", "--json",
	}, &out, io.Discard)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	// The least writes of groups per cluster: one for each changed profile. In reconnect, the hub repeats deliveries whose
	// reports its watch has not received yet.
	groupWrites := map[string]float64{"change": 2, "restart": 1, "reconnect": 1, "hanging": 1, "summaries": 1}
	decoder := json.NewDecoder(&out)
	for _, scenario := range allScenarios() {
		want := scenario.name
		var got result
		if err := decoder.Decode(&got); err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		if got.Scenario != want || len(got.Values) < 5 {
			t.Errorf("got scenario %q with %d figures, want %q with more", got.Scenario, len(got.Values), want)
		}
		// In summaries, the hub finds the summaries unchanged that were written to etcd.
		if writes := got.Requests["PATCH configurationgroups"]; writes < groupWrites[want] || want == "summaries" && writes > 2 {
			t.Errorf("%s: got %v writes of groups per cluster, want %v: %v", want, writes, groupWrites[want], got.Requests)
		}
		// For each of two profiles: the group, the report and the status of the summary; the ClusterConfiguration twice at
		// most; and a third of eight writes of content and bundles. A further write per profile would be 12.7.
		if i := slices.IndexFunc(got.Values, func(v value) bool { return v.Name == "writes per cluster" }); want == "change" && (i < 0 || got.Values[i].Value > 12.5) {
			t.Errorf("%s: got %v, want at most 12.5 writes per cluster: %v", want, got.Values, got.Requests)
		}
		if clusters := got.Stored["sveltosclusters"]; clusters.Objects < 3 || clusters.Bytes < 100*clusters.Objects {
			t.Errorf("%s: got %+v for the stored clusters, want 3 or more", want, clusters)
		}
	}
}

// TestPrivateContent gives each cluster a namespace and a copy of the content of its own, prints text, and writes a
// heap profile.
func TestPrivateContent(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	heap := filepath.Join(t.TempDir(), "heap.pb.gz")
	err := command(t.Context(), []string{"--clusters=3", "--private", "--timeout=2m", "--scenarios=register,new,change", "--heap-profile=" + heap}, &out, io.Discard)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if raw, err := os.ReadFile(heap); err != nil || !bytes.HasPrefix(raw, []byte{0x1f, 0x8b}) { // gzip
		t.Errorf("the heap profile is %.20q, and %v", raw, err)
	}
	for _, line := range []string{`(?m)^register: `, `(?m)^change: `, `(?m)^  hub memory +[1-9][0-9.]* MiB$`, `(?m)^  API server memory +[1-9][0-9.]* MiB$`, `(?m)^    POST configurationbundles per cluster +1\.00$`} {
		if !regexp.MustCompile(line).MatchString(out.String()) {
			t.Errorf("no line is like %s:\n%s", line, out.String())
		}
	}
}

// TestUnknownScenarioIsRefused names a scenario that does not exist.
func TestUnknownScenarioIsRefused(t *testing.T) {
	t.Parallel()
	if err := command(t.Context(), []string{"--scenarios=regsiter"}, io.Discard, io.Discard); err == nil {
		t.Error("got no error")
	}
}
