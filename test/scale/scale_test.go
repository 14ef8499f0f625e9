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
		"--clusters=3", "--namespace=fleet", "--outage=2s", "--matrix-profiles=3", "--matrix-clusters=2", "--timeout=2m", "--json", "--scenarios=register,new,change,tenth,matrix,restart,reconnect,hanging",
	}, &out, io.Discard)
	if err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	decoder := json.NewDecoder(&out)
	for _, want := range []string{"register", "new", "change", "tenth", "matrix", "restart", "reconnect", "hanging"} {
		var got result
		if err := decoder.Decode(&got); err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		if got.Scenario != want || len(got.Values) < 5 {
			t.Errorf("got scenario %q with %d figures, want %q with more", got.Scenario, len(got.Values), want)
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
