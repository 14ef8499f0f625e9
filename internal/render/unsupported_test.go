package render_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/render"
)

// everyField lists every field of a profile's spec with the smallest refused path above it when it has the value that
// leaf gives it, or "" if Towline acts on it. A field that is added to the API has to be added here too, which is the
// moment to think about it.
func everyField() map[string]string {
	table := map[string]string{}
	for refused, fields := range map[string]string{
		"": `patches patchesFrom extraLabels extraAnnotations driftExclusions helmCharts[0].options.postRenderStrategy
			clusterSelector clusterRefs syncMode tier continueOnConflict continueOnError stopMatchingBehavior
			policyRefs[0].namespace policyRefs[0].name policyRefs[0].kind policyRefs[0].deploymentType policyRefs[0].optional
			policyRefs[0].path policyRefs[0].tier policyRefs[0].skipNamespaceCreation policyRefs[0].remoteURL policyRefs[0].force
			templateResourceRefs[0].identifier templateResourceRefs[0].optional templateResourceRefs[0].ignoreStatusChanges
			templateResourceRefs[0].watchFields templateResourceRefs[0].resource
			kustomizationRefs[0].namespace kustomizationRefs[0].name kustomizationRefs[0].kind kustomizationRefs[0].path
			kustomizationRefs[0].components kustomizationRefs[0].optional kustomizationRefs[0].targetNamespace
			kustomizationRefs[0].deploymentType kustomizationRefs[0].values kustomizationRefs[0].valuesFrom
			kustomizationRefs[0].tier kustomizationRefs[0].skipNamespaceCreation kustomizationRefs[0].force
			kustomizationRefs[0].remoteURL
			helmCharts[0].repositoryURL helmCharts[0].repositoryName helmCharts[0].chartName helmCharts[0].chartVersion
			helmCharts[0].releaseName helmCharts[0].releaseNamespace helmCharts[0].values helmCharts[0].valuesFrom
			helmCharts[0].helmChartAction helmCharts[0].registryCredentialsConfig
			helmCharts[0].signatureVerification helmCharts[0].provenanceVerification
			helmCharts[0].options.skipCRDs helmCharts[0].options.skipSchemaValidation helmCharts[0].options.disableHooks
			helmCharts[0].options.wait helmCharts[0].options.waitForJobs helmCharts[0].options.timeout helmCharts[0].options.atomic
			helmCharts[0].options.labels helmCharts[0].options.description helmCharts[0].options.runTests
			helmCharts[0].options.passCredentialsAll helmCharts[0].options.installOptions.createNamespace
			helmCharts[0].options.installOptions.replace
			helmCharts[0].options.installOptions.disableHooks helmCharts[0].options.installOptions.takeOwnership
			helmCharts[0].options.installOptions.recoverAfterConsecutiveFailures helmCharts[0].options.upgradeOptions.force
			helmCharts[0].options.upgradeOptions.maxHistory helmCharts[0].options.upgradeOptions.cleanupOnFail
			helmCharts[0].options.upgradeOptions.subNotes helmCharts[0].options.upgradeOptions.disableHooks
			helmCharts[0].options.upgradeOptions.takeOwnership
			helmCharts[0].options.uninstallOptions.keepHistory helmCharts[0].options.uninstallOptions.deletionPropagation
			helmCharts[0].options.uninstallOptions.disableHooks
			helmCharts[0].options.upgradeOptions.resetValues helmCharts[0].options.upgradeOptions.upgradeCRDs`,
		"itself": `reloader maxConsecutiveFailures
			helmCharts[0].options.dependencyUpdate
			helmCharts[0].options.disableOpenAPIValidation helmCharts[0].options.enableClientCache
			helmCharts[0].options.upgradeOptions.reuseValues helmCharts[0].options.upgradeOptions.resetThenReuseValues
			helmCharts[0].options.upgradeOptions.recreate
			setRefs maxUpdate dependsOn transitionFrom preDeployChecks validateHealths
			preDeleteChecks postDeleteChecks`,
	} {
		for _, field := range strings.Fields(fields) {
			table[field] = ""
			if refused == "itself" {
				table[field] = "spec." + field
			}
		}
	}
	return table
}

// TestEveryFieldIsSupportedOrUnsupported sets each leaf of the spec, one at a time, and checks the result of
// Unsupported.
func TestEveryFieldIsSupportedOrUnsupported(t *testing.T) {
	t.Parallel()
	table, used := everyField(), map[string]bool{}
	leaves := 0
	walk(reflect.TypeFor[configv1beta1.ProfileSpec](), nil, func(steps []int) {
		leaves++
		spec := configv1beta1.ProfileSpec{}
		path := set(reflect.ValueOf(&spec).Elem(), steps, "")
		entry := covering(table, path)
		if entry == "" {
			t.Errorf("nobody has said whether Towline acts on spec.%s", path)
			return
		}
		used[entry] = true
		var want []string
		if table[entry] != "" {
			want = []string{table[entry]}
		}
		if got := render.Unsupported(spec); !slices.Equal(got, want) {
			t.Errorf("spec.%s: got %q, want %q", path, got, want)
		}
	})
	for entry := range table {
		if !used[entry] {
			t.Errorf("there is no field %s", entry)
		}
	}
	if leaves < 200 {
		t.Errorf("looked at %d leaves, but the API has many more", leaves)
	}
}

// covering returns the entry of table that is path or above it.
func covering(table map[string]string, path string) string {
	for entry := range table {
		if rest, ok := strings.CutPrefix(path, entry); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return entry
		}
	}
	return ""
}

// walk calls visit with the field indices that lead to every leaf of t.
func walk(t reflect.Type, steps []int, visit func(steps []int)) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct || slices.Contains(scalars(), t) {
		visit(steps)
		return
	}
	for i := range t.NumField() {
		walk(t.Field(i).Type, append(slices.Clone(steps), i), visit)
	}
}

// scalars are the structs that are one value in JSON.
func scalars() []reflect.Type {
	return []reflect.Type{reflect.TypeFor[intstr.IntOrString](), reflect.TypeFor[metav1.Duration]()}
}

// set gives the leaf at steps a value that is not its default and returns its path.
func set(v reflect.Value, steps []int, path string) string {
	switch {
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return set(v.Elem(), steps, path)
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		return set(v.Index(0), steps, path+"[0]")
	case len(steps) == 0:
		fill(v, path)
		return path
	}
	field := v.Type().Field(steps[0])
	name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
	if name != "" && path != "" {
		name = "." + name
	}
	return set(v.Field(steps[0]), steps[1:], path+name)
}

func fill(v reflect.Value, path string) {
	words := map[string]string{
		"syncMode":                            string(configv1beta1.SyncModeOneTime),
		"policyRefs[0].kind":                  string(libv1beta1.SourceConfigMap),
		"policyRefs[0].deploymentType":        string(libv1beta1.DeploymentTypeRemote),
		"kustomizationRefs[0].kind":           string(libv1beta1.SourceSecret),
		"kustomizationRefs[0].deploymentType": string(libv1beta1.DeploymentTypeRemote),
		"helmCharts[0].options.uninstallOptions.deletionPropagation": string(configv1beta1.DeletionOrphan),
	}
	switch v.Kind() {
	case reflect.String:
		word := words[path]
		if word == "" {
			word = "x"
		}
		v.SetString(word)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(reflect.ValueOf("k").Convert(v.Type().Key()), reflect.Zero(v.Type().Elem()))
	case reflect.Struct:
		switch value := v.Addr().Interface().(type) {
		case *intstr.IntOrString:
			*value = intstr.FromInt32(7)
		case *metav1.Duration:
			value.Duration = time.Second
		}
	default:
		panic(fmt.Sprintf("cannot fill a %s at %s", v.Kind(), path))
	}
}

func TestUnsupportedReturnsThePath(t *testing.T) {
	t.Parallel()
	var spec configv1beta1.ProfileSpec
	err := yaml.UnmarshalStrict([]byte(`
clusterSelector: {matchLabels: {env: test}}
syncMode: DryRun
dependsOn: [other]
policyRefs:
- {kind: ConfigMap, name: a, deploymentType: Local}
- {kind: Bucket, name: b, path: c}
- remoteURL: {url: "https://example.com/a.yaml"}
helmCharts:
- {repositoryURL: "http://example.com", repositoryName: a, chartName: a, chartVersion: 1.0.0, releaseName: a, releaseNamespace: a}
- repositoryURL: gitrepository://a/b/c
  releaseName: b
  releaseNamespace: b
  options:
    wait: true
    postRenderStrategy: nohooks
    dependencyUpdate: true
    installOptions: {createNamespace: false, replace: false}
    upgradeOptions: {force: true, reuseValues: true, resetThenReuseValues: true, recreate: true}
kustomizationRefs:
- {kind: ConfigMap, name: k, path: p, components: [c], targetNamespace: n, values: {a: b}, valuesFrom: [{kind: Secret, name: v}]}
- {kind: Bucket, name: k, deploymentType: Local}
- {remoteURL: {url: "https://example.com"}}
`), &spec)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"spec.dependsOn",
		"spec.helmCharts[1].options.dependencyUpdate",
		"spec.helmCharts[1].options.installOptions.replace",
		"spec.helmCharts[1].options.upgradeOptions.recreate",
		"spec.helmCharts[1].options.upgradeOptions.resetThenReuseValues",
		"spec.helmCharts[1].options.upgradeOptions.reuseValues",
		"spec.syncMode",
	}
	if diff := cmp.Diff(want, render.Unsupported(spec)); diff != "" {
		t.Errorf("paths differ (-want +got):\n%s", diff)
	}
}

func TestDefaultsAreSupported(t *testing.T) {
	t.Parallel()
	var spec configv1beta1.ProfileSpec
	err := yaml.UnmarshalStrict([]byte(`
syncMode: ContinuousWithDriftDetection
tier: 100
continueOnConflict: false
stopMatchingBehavior: LeavePolicies
reloader: false
policyRefs: [{kind: Secret, name: a, deploymentType: Remote, tier: 100}]
helmCharts:
- repositoryURL: oci://example.com
  releaseName: b
  releaseNamespace: b
  helmChartAction: Uninstall
  options:
    wait: false
    timeout: 5m
    installOptions: {createNamespace: true, replace: true, recoverAfterConsecutiveFailures: 5}
    upgradeOptions: {maxHistory: 2, force: false}
    uninstallOptions: {keepHistory: false, deletionPropagation: background}
`), &spec)
	if err != nil {
		t.Fatal(err)
	}
	if got := render.Unsupported(spec); len(got) != 0 {
		t.Errorf("got %q, want nothing", got)
	}
}
