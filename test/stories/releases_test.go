package stories

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/localkube"
)

// target is a member that a story deploys releases to.
type target struct {
	namespace, cluster string
	plane              *localkube.Plane
}

// chartProfile is a ClusterProfile with one chart for all targets. The chart, the release and its namespace have the
// name of the profile.
type chartProfile struct {
	*world
	name    string
	targets []target
	// chart has further fields of the item of helmCharts.
	chart map[string]any
}

// deploy applies the profile with values and options.
func (p *chartProfile) deploy(values, options map[string]any) {
	p.t.Helper()
	chart := map[string]any{
		"repositoryURL": p.Charts, "repositoryName": "stories", "chartName": "stories/" + p.name, "chartVersion": "0.1.0",
		"releaseName": p.name, "releaseNamespace": p.name, "values": p.yaml(values),
	}
	for field, value := range p.chart {
		chart[field] = value
	}
	if options != nil {
		chart["options"] = options
	}
	p.apply(p.hub, p.yaml(map[string]any{
		"apiVersion": "config.projectsveltos.io/v1beta1", "kind": "ClusterProfile", "metadata": map[string]any{"name": p.name},
		"spec": map[string]any{"clusterSelector": map[string]any{"matchLabels": map[string]any{"stories": "yes"}}, "helmCharts": []any{chart}},
	}))
}

func (w *world) yaml(value any) string {
	w.t.Helper()
	text, err := yaml.Marshal(value)
	if err != nil {
		w.t.Fatal(err)
	}
	return string(text)
}

func (p *chartProfile) summary(at target) string { return p.name + "-sveltos-" + at.cluster }

// eventuallyEverywhere waits until check passes for each target.
func (p *chartProfile) eventuallyEverywhere(what string, check func(at target) error) {
	p.t.Helper()
	for _, at := range p.targets {
		p.eventually(p.name+": "+what+" on "+at.cluster, func() error { return check(at) })
	}
}

// awaitRevision waits until a revision of the release is deployed to all targets.
func (p *chartProfile) awaitRevision(revision int) {
	p.t.Helper()
	p.eventuallyEverywhere(fmt.Sprintf("revision %d is deployed", revision), func(at target) error {
		if err := p.wantStatuses(at.namespace, p.summary(at), "Provisioned"); err != nil {
			return err
		}
		history, err := p.history(at)
		if err != nil {
			return err
		}
		if last := history[len(history)-1]; last.Revision != revision || last.Status != "deployed" {
			return fmt.Errorf("the last revision is %+v", last)
		}
		return nil
	})
}

// awaitFailure waits until the summaries of all targets report a failure with the texts.
func (p *chartProfile) awaitFailure(texts ...string) {
	p.t.Helper()
	p.eventuallyEverywhere("the release fails", func(at target) error { return p.wantFailureTexts(at, texts...) })
}

func (p *chartProfile) wantFailureTexts(at target, texts ...string) error {
	summary := &configv1beta1.ClusterSummary{}
	if err := p.client(p.hub).Get(p.t.Context(), client.ObjectKey{Namespace: at.namespace, Name: p.summary(at)}, summary); err != nil {
		return err
	}
	var messages []string
	for _, feature := range summary.Status.FeatureSummaries {
		messages = append(messages, fmt.Sprintf("%s: %s", feature.Status, feature.FailureMessage))
	}
	all := strings.Join(messages, "; ")
	for _, text := range append(texts, "Failed") {
		if !strings.Contains(all, text) {
			return fmt.Errorf("the summary reports %q, want %q in it", all, text)
		}
	}
	return nil
}

// helmRevision is one line of `helm history`.
type helmRevision struct {
	Revision    int
	Status      string
	Chart       string
	Description string
}

// history returns the revisions of the release, the oldest first; there is at least one.
func (p *chartProfile) history(at target) ([]helmRevision, error) {
	out, err := p.tryHelm(at.plane, "history", p.name, "-n", p.name, "-o", "json")
	if err != nil {
		return nil, err
	}
	var all []helmRevision
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("helm history is empty")
	}
	return all, nil
}
