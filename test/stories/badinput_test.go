package stories

import (
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
)

// badCase is one mistake of a user: a change for the worse of a profile that was delivered.
type badCase struct {
	// good is added to the good profile of the case.
	good string
	// broken is applied to the hub after the good profile of the case has been delivered. %[1]s stands for the name of the
	// case, %[2]s for the URL of the chart repository and %[3]s for a URL without a server.
	broken string
	// texts must be in the message: the object, the place, and the mistake.
	texts []string
}

// badGood is the good profile of a case. The name of the case is in all its names, so that all cases fit on one
// cluster.
const badGood = `
---
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s}
data:
  objects.yaml: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: %[1]s, name: first}
    data: {text: good}
    ---
    apiVersion: v1
    kind: Service
    metadata: {namespace: %[1]s, name: second}
    spec:
      selector: {app: web}
      ports: [{port: 80}]
`

// badProfile is the profile of a case; further lines of its spec follow.
const badProfile = `
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {env: bad}}
  policyRefs:
  - {kind: ConfigMap, namespace: default, name: %[1]s}
`

// badChart is the Helm part of a case's profile: repository, chart and values differ.
const badChart = `
  helmCharts:
  - repositoryURL: %[2]s
    repositoryName: stories
    chartName: stories/%[3]s
    chartVersion: 1.0.0
    releaseName: %[1]s
    releaseNamespace: %[1]s
    helmChartAction: Install
    values: |
      message: good
%[4]s`

func badCases() map[string]badCase {
	return map[string]badCase{
		"broken-yaml": {
			broken: "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {namespace: default, name: %[1]s}\ndata:\n  objects.yaml: |\n    apiVersion: v1\n    kind: [ConfigMap\n",
			texts:  []string{"ConfigMap", "default/broken-yaml", "objects.yaml"},
		},
		"missing-reference": {
			broken: badProfile + "  - {kind: ConfigMap, namespace: default, name: nobody-made-this}\n",
			texts:  []string{"ConfigMap", "default/nobody-made-this"},
		},
		"missing-chart": {
			broken: badProfile + chartOf("%[2]s", "no-such-chart", ""),
			texts:  []string{"no-such-chart", "http://127.0.0.1:"},
		},
		"chart-does-not-render": {
			broken: badProfile + chartOf("%[2]s", "bad-template", ""),
			texts:  []string{"bad-template", "templates/broken.yaml", "nobodyDefined"},
		},
		"values-fail-schema": {
			good:   chartOf("%[2]s", "hello", "      replicas: 2\n"),
			broken: badProfile + chartOf("%[2]s", "hello", "      replicas: many\n"),
			texts:  []string{"hello", "replicas"},
		},
		"refused-object": {
			broken: badGood + "    ---\n    apiVersion: v1\n    kind: Service\n    metadata: {namespace: %[1]s, name: third}\n    spec: {ports: [{port: 99999}]}\n",
			texts:  []string{"Service", "refused-object/third", "99999"},
		},
		"unknown-kind": {
			broken: badGood + "    ---\n    apiVersion: example.org/v1\n    kind: Unheard\n    metadata: {namespace: %[1]s, name: third}\n",
			texts:  []string{"Unheard", "example.org"},
		},
		"unreachable-repository": {
			broken: badProfile + chartOf("%[3]s", "hello", ""),
			texts:  []string{"hello", "http://127.0.0.1:", "connection refused"},
		},
		"field-without-effect": {
			broken: badProfile + "  dependsOn: [other]\n",
			texts:  []string{"dependsOn"},
		},
	}
}

// chartOf fills the repository, the chart and more values into badChart and leaves the name of the case open.
func chartOf(repository, chart, values string) string {
	return strings.NewReplacer("%[2]s", repository, "%[3]s", chart, "%[4]s", values).Replace(badChart)
}

// TestBadInput makes a mistake in each of several delivered profiles. Each mistake is named on the summaries and in an
// event, and no delivered object is changed, neither on a pull nor on a push member.
func TestBadInput(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := w.startBadMembers()
	charts := badRepository(t)
	deliveries := w.deliverGood(members, badCases(), "%[2]s", charts, "%[3]s", unreachableURL)
	deliveries.makeMistakes()
	deliveries.awaitFailureReports()
}

// startBadMembers starts a pull and a push member with env=bad.
func (w *world) startBadMembers() map[string]*localkube.Plane {
	w.t.Helper()
	return map[string]*localkube.Plane{"edge pull-1": w.pullMember("edge", "pull-1", "env=bad"), "cloud push-1": w.pushMember("cloud", "push-1", "env=bad")}
}

// badDeliveries has the good profiles of cases on members. The keys of members are namespace/name.
type badDeliveries struct {
	*world
	members map[string]*localkube.Plane
	cases   map[string]badCase
	fills   []string // old and new texts of a strings.Replacer
	// before has the objects of each member and case.
	before map[string]map[string]fingerprint
}

// deliverGood delivers the good profile of each case to the members. It replaces fills in the texts of the cases.
func (w *world) deliverGood(members map[string]*localkube.Plane, cases map[string]badCase, fills ...string) *badDeliveries {
	w.t.Helper()
	d := &badDeliveries{world: w, members: members, cases: cases, fills: fills, before: map[string]map[string]fingerprint{}}
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		w.apply(w.hub, d.fill(name, badGood+badProfile+cases[name].good))
	}
	for member, plane := range members {
		namespace, cluster, _ := strings.Cut(member, " ")
		for name := range cases {
			w.awaitProvisioned(namespace, name+"-sveltos-"+cluster)
			d.before[member+" "+name] = w.fingerprints(plane, name)
		}
	}
	return d
}

func (d *badDeliveries) fill(name, text string) string {
	return strings.NewReplacer(append([]string{"%[1]s", name}, d.fills...)...).Replace(text)
}

// makeMistakes makes the mistake of each case.
func (d *badDeliveries) makeMistakes() {
	d.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(d.cases)) {
		d.apply(d.hub, d.fill(name, d.cases[name].broken))
	}
}

// awaitFailureReports waits until the mistakes are reported, and compares the delivered objects with the ones before.
func (d *badDeliveries) awaitFailureReports() {
	d.t.Helper()
	for _, name := range slices.Sorted(maps.Keys(d.cases)) {
		for member, plane := range d.members {
			namespace, cluster, _ := strings.Cut(member, " ")
			d.t.Run(name+"/"+cluster, func(t *testing.T) {
				subtest := *d.world
				subtest.t = t
				subtest.awaitFailureReport(namespace, name+"-sveltos-"+cluster, d.cases[name].texts)
				if diff := cmp.Diff(d.before[member+" "+name], subtest.fingerprints(plane, name)); diff != "" {
					t.Errorf("delivered objects (-before +after):\n%s", diff)
				}
			})
		}
	}
}

// badRepository serves the example chart, and a chart that does not render.
func badRepository(t *testing.T) string {
	t.Helper()
	repository, err := examples.Repository(
		examples.Chart{Name: "hello", Version: "1.0.0"},
		examples.Chart{Name: "bad-template", Version: "1.0.0", Files: map[string]string{"templates/broken.yaml": "{{ include \"nobodyDefined\" . }}\n"}},
	)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(repository)
	t.Cleanup(server.Close)
	return server.URL
}

// unreachableURL is a URL without a server. A port that a test closes can become the port of another test's server.
const unreachableURL = "http://127.0.0.1:1"

// awaitFailureReport waits until a summary has failed with a message that has all texts, and until an event has them.
func (w *world) awaitFailureReport(namespace, summary string, texts []string) {
	w.t.Helper()
	message := ""
	w.eventually(summary+" reports the failure", func() error {
		var got configv1beta1.ClusterSummary
		if err := w.client(w.hub).Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: summary}, &got); err != nil {
			return err
		}
		message = failureMessage(got)
		return wantTexts(message, texts)
	})
	w.t.Logf("%s: %s", summary, message)
	w.eventually("an event reports the failure", func() error {
		var events eventsv1.EventList
		if err := w.client(w.hub).List(w.t.Context(), &events, client.InNamespace(namespace)); err != nil {
			return err
		}
		last := errors.New("no warning event exists")
		for _, event := range events.Items {
			if event.Regarding.Name != summary || event.Type != "Warning" {
				continue
			}
			if last = wantTexts(event.Note, texts); last == nil {
				return nil
			}
		}
		return last
	})
}

// expectUntouched records Towline's objects in a namespace of members, whose keys are namespace/name. The returned
// function waits until the summaries of a profile report the failure, and compares the objects.
func (w *world) expectUntouched(members map[string]*localkube.Plane, profile, namespace string) func(texts ...string) {
	w.t.Helper()
	before := map[string]map[string]fingerprint{}
	for member, plane := range members {
		if before[member] = w.fingerprints(plane, namespace); len(before[member]) == 0 {
			w.t.Fatalf("%s has no objects in %s", member, namespace)
		}
	}
	return func(texts ...string) {
		w.t.Helper()
		for member, plane := range members {
			fleet, cluster, _ := strings.Cut(member, "/")
			w.awaitFailureReport(fleet, profile+"-sveltos-"+cluster, texts)
			if diff := cmp.Diff(before[member], w.fingerprints(plane, namespace)); diff != "" {
				w.t.Errorf("objects on %s (-before +after):\n%s", member, diff)
			}
		}
	}
}

// failureMessage returns the failure messages of a summary, "" if nothing failed.
func failureMessage(summary configv1beta1.ClusterSummary) string {
	var messages []string
	if summary.Status.FailureMessage != "" {
		messages = append(messages, summary.Status.FailureMessage)
	}
	for _, feature := range summary.Status.FeatureSummaries {
		if strings.HasPrefix(string(feature.Status), "Failed") {
			messages = append(messages, feature.FailureMessage)
		}
	}
	return strings.Join(messages, "\n")
}

func wantTexts(message string, texts []string) error {
	for _, text := range texts {
		if !strings.Contains(message, text) {
			return fmt.Errorf("%q does not contain %q", message, text)
		}
	}
	return nil
}

// fingerprint changes whenever an object is written.
type fingerprint struct{ UID, ResourceVersion string }

// fingerprints returns the fingerprints of Towline's ConfigMaps and Services in a namespace.
func (w *world) fingerprints(plane *localkube.Plane, namespace string) map[string]fingerprint {
	w.t.Helper()
	prints := map[string]fingerprint{}
	for _, kind := range []string{"ConfigMap", "Service"} {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(schema.GroupVersionKind{Version: "v1", Kind: kind + "List"})
		if err := w.client(plane).List(w.t.Context(), list, client.InNamespace(namespace)); err != nil {
			w.t.Fatal(err)
		}
		for _, item := range list.Items {
			if _, ours := item.GetAnnotations()[kube.AnnotationRequestor]; ours {
				prints[kind+" "+item.GetName()] = fingerprint{string(item.GetUID()), item.GetResourceVersion()}
			}
		}
	}
	return prints
}

// TestBadInputOnTheCommandLine makes mistakes that a command refuses: each is reported on standard error, and no object
// is created.
func TestBadInputOnTheCommandLine(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	w.kubectl(w.hub, "create", "namespace", "cloud")
	nothing := w.save("not-a-kubeconfig", "this is not a kubeconfig\n")
	unreachable := w.save("unreachable.kubeconfig", unreachableKubeconfig("https://127.0.0.1:1"))
	for name, tc := range map[string]struct {
		args  []string
		names []string
	}{
		"a file that is no kubeconfig": {
			args:  []string{"--namespace=cloud", "--cluster=mistaken", "--kubeconfig=" + nothing},
			names: []string{"--kubeconfig", "kubeconfig"},
		},
		"a kubeconfig that does not exist": {
			args:  []string{"--namespace=cloud", "--cluster=mistaken", "--kubeconfig=" + nothing + "-2"},
			names: []string{nothing + "-2", "no such file"},
		},
		"a kubeconfig to a cluster that does not answer": {
			args:  []string{"--namespace=cloud", "--cluster=mistaken", "--kubeconfig=" + unreachable},
			names: []string{"--kubeconfig", "127.0.0.1", "cannot be reached"},
		},
		"labels that do not parse": {
			args:  []string{"--namespace=fresh", "--cluster=mistaken", "--pullmode", "--labels=env"},
			names: []string{"invalid key-value pair format: env"},
		},
		"a label that is none": {
			args:  []string{"--namespace=fresh", "--cluster=mistaken", "--pullmode", "--labels=env=not allowed"},
			names: []string{"--labels", "env=not allowed"},
		},
		"a cluster name that is not a DNS label": {
			args:  []string{"--namespace=fresh", "--cluster=Not_A_Label", "--pullmode"},
			names: []string{"--cluster", "Not_A_Label", "DNS"},
		},
		"a namespace that is not a DNS label": {
			args:  []string{"--namespace=Fresh!", "--cluster=mistaken", "--pullmode"},
			names: []string{"--namespace", "Fresh!", "DNS"},
		},
		"neither pull mode nor a kubeconfig": {
			args:  []string{"--namespace=cloud", "--cluster=mistaken"},
			names: []string{"either kubeconfig or fleet-cluster-context must be specified", "--pullmode"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			subtest := *w
			subtest.t = t
			before := subtest.listRegistrationObjects()
			stdout, err := subtest.try(w.hub, "sveltosctl", append([]string{"register", "cluster"}, tc.args...)...)
			if err == nil {
				t.Fatal("the command succeeded")
			}
			if stdout != "" {
				t.Errorf("standard output is for data only, got %q", stdout)
			}
			if err := wantTexts(err.Error(), tc.names); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(before, subtest.listRegistrationObjects()); diff != "" {
				t.Errorf("objects on the hub (-before +after):\n%s", diff)
			}
		})
	}
}

// listRegistrationObjects lists the names of all objects that a registration could leave on the hub.
func (w *world) listRegistrationObjects() []string {
	w.t.Helper()
	out := w.kubectl(w.hub, "get", "namespaces,sveltosclusters,serviceaccounts,secrets,roles,rolebindings,clusterroles,clusterrolebindings,leases", "-A",
		"-o", `jsonpath={range .items[*]}{.kind} {.metadata.namespace}/{.metadata.name}{"\n"}{end}`)
	names := strings.Split(strings.TrimSpace(out), "\n")
	slices.Sort(names)
	return names
}

func unreachableKubeconfig(address string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q}}]
users: [{name: u, user: {token: none}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, address)
}
