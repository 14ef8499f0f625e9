package main

import (
	"bytes"
	"encoding/json"
	"io"
	"testing"
)

// TestScenarios runs the scenarios with few clusters. It checks that they end and that each prints figures, and judges
// none of them. The scenarios that wait for minutes are left out.
func TestScenarios(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := command(t.Context(), []string{
		"--clusters=3", "--namespace=fleet", "--outage=2s", "--matrix-profiles=3", "--matrix-clusters=2", "--fill-profiles=5", "--timeout=2m", "--json", "--scenarios=register,new,change,tenth,matrix,restart,reconnect,hanging,summaries",
	}, &out, io.Discard)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	decoder := json.NewDecoder(&out)
	for _, want := range []string{"register", "new", "change", "tenth", "matrix", "restart", "reconnect", "hanging", "summaries"} {
		var got result
		if err := decoder.Decode(&got); err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		if got.Scenario != want || len(got.Values) < 5 {
			t.Errorf("got scenario %q with %d figures, want %q with more", got.Scenario, len(got.Values), want)
		}
		// The hub delivers the change, and finds the summaries unchanged that were written to etcd.
		if writes := got.Requests["PATCH configurationgroups"]; want == "summaries" && (writes < 1 || writes > 2) {
			t.Errorf("got %v writes of groups per cluster, want one for the change: %v", writes, got.Requests)
		}
		if clusters := got.Stored["sveltosclusters"]; clusters.Objects < 3 || clusters.Bytes < 100*clusters.Objects {
			t.Errorf("%s: got %+v for the stored clusters, want 3 or more", want, clusters)
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
