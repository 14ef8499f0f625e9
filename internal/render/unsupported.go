package render

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// Unsupported returns the JSON paths of what spec asks for and Towline does not do yet, sorted: "spec.kustomizationRefs",
// "spec.helmCharts[0].options.wait". A field that is at its default asks for nothing. A profile with any of them must be refused: no
// field is silently ignored.
func Unsupported(spec configv1beta1.ProfileSpec) []string {
	raw, err := json.Marshal(spec)
	if err != nil {
		return []string{"spec"} // has no JSON form, so nothing of it can be acted on
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		return []string{"spec"}
	}
	var paths []string
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		paths = append(paths, refused("spec."+name, name, fields[name])...)
	}
	slices.Sort(paths)
	return paths
}

// UnsupportedLabels is Unsupported for the labels of a profile: deploying as a ServiceAccount is not done yet, and to deploy as
// Towline instead would give the profile more rights than its author has.
func UnsupportedLabels(labels map[string]string) []string {
	var paths []string
	for _, label := range []string{libv1beta1.ServiceAccountNameLabel, libv1beta1.ServiceAccountNamespaceLabel} {
		if labels[label] != "" {
			paths = append(paths, fmt.Sprintf("metadata.labels[%s]", label))
		}
	}
	return paths
}

// verdict says what is to be thought of one field.
type verdict string

const (
	acted   verdict = "acted"   // Towline does what it and everything below it says
	partly  verdict = "partly"  // each field below it has a verdict of its own
	ignored verdict = "ignored" // Towline does not act on it
	unknown verdict = "unknown" // nobody has thought of it
)

// refused returns the paths at or below path that Towline does not act on. Pattern is path without "spec." and indices. Fields that are
// not set never come here, as they are not in the JSON form; what is there and empty was set on purpose.
func refused(path, pattern string, value any) []string {
	switch judge(pattern, value) {
	case acted:
		return nil
	case partly:
		return refusedBelow(path, pattern, value)
	}
	return []string{path}
}

func refusedBelow(path, pattern string, value any) []string {
	var paths []string
	switch value := value.(type) {
	case map[string]any:
		for name, field := range value {
			paths = append(paths, refused(path+"."+name, pattern+"."+name, field)...)
		}
	case []any:
		for i, item := range value {
			paths = append(paths, refusedBelow(fmt.Sprintf("%s[%d]", path, i), pattern+"[]", item)...)
		}
	}
	return paths
}

// judge gives the verdict on the field at pattern if it has this value.
func judge(pattern string, value any) verdict {
	list, field, inItem := strings.Cut(pattern, "[].")
	switch {
	case !inItem:
		return judgeSpec(pattern, value)
	case list == "policyRefs":
		return judgePolicyRef(field, value)
	case list == "helmCharts":
		if option, ok := strings.CutPrefix(field, "options."); ok {
			return judgeHelmOption(option, value)
		}
		return judgeHelmChart(field, value)
	}
	return unknown
}

func judgeSpec(field string, value any) verdict {
	switch field {
	case "clusterSelector", "clusterRefs", "tier", "continueOnConflict", "continueOnError", "stopMatchingBehavior":
		return acted
	case "syncMode":
		return actedIf(value != string(configv1beta1.SyncModeDryRun))
	case "policyRefs", "helmCharts":
		return partly
	case "reloader":
		return actedIf(value == false)
	case "setRefs", "maxUpdate", "templateResourceRefs", "dependsOn", "transitionFrom", "kustomizationRefs", "preDeployChecks",
		"validateHealths", "preDeleteChecks", "postDeleteChecks", "patches", "patchesFrom", "driftExclusions",
		"maxConsecutiveFailures", "extraLabels", "extraAnnotations":
		return ignored
	}
	return unknown
}

func judgePolicyRef(field string, value any) verdict {
	switch field {
	case "namespace", "name", "optional", "tier", "skipNamespaceCreation", "force":
		return acted
	case "kind":
		return actedIf(value == string(libv1beta1.SourceConfigMap) || value == string(libv1beta1.SourceSecret))
	case "deploymentType":
		return actedIf(value == string(libv1beta1.DeploymentTypeRemote))
	case "path", "remoteURL":
		return ignored
	}
	return unknown
}

func judgeHelmChart(field string, value any) verdict {
	switch field {
	case "repositoryName", "chartName", "chartVersion", "releaseName", "releaseNamespace", "values", "valuesFrom", "helmChartAction",
		"registryCredentialsConfig", "signatureVerification", "provenanceVerification":
		return acted
	case "repositoryURL":
		scheme, _, _ := strings.Cut(fmt.Sprint(value), "://")
		return actedIf(!slices.Contains([]string{"gitrepository", "ocirepository", "bucket"}, scheme))
	case "options":
		return partly
	}
	return unknown
}

// judgeHelmOption gives the verdict on an option of a chart. The doc comments of the API say why some are refused.
func judgeHelmOption(option string, value any) verdict {
	switch option {
	case "skipCRDs", "skipSchemaValidation", "disableHooks", "passCredentialsAll", "wait", "waitForJobs", "timeout", "atomic", "runTests",
		"labels", "description",
		"installOptions.createNamespace", "installOptions.disableHooks", "installOptions.recoverAfterConsecutiveFailures",
		"upgradeOptions.force", "upgradeOptions.maxHistory", "upgradeOptions.cleanupOnFail", "upgradeOptions.subNotes",
		"upgradeOptions.disableHooks",
		"uninstallOptions.keepHistory", "uninstallOptions.deletionPropagation", "uninstallOptions.disableHooks":
		return acted
	case "disableOpenAPIValidation", "enableClientCache":
		return acted // the API server checks objects, and Towline caches discovery, whatever they say
	case "installOptions.takeOwnership", "upgradeOptions.takeOwnership":
		return acted // always so: with the default filled in, false does not tell whether anybody asked for a refusal
	case "upgradeOptions.resetValues", "upgradeOptions.upgradeCRDs":
		return acted // always so: a member equals its bundle, which holds the CRDs and never an earlier release's values
	case "installOptions", "upgradeOptions", "uninstallOptions":
		return partly
	case "installOptions.replace":
		return actedIf(value == true)
	case "dependencyUpdate", "upgradeOptions.reuseValues", "upgradeOptions.resetThenReuseValues", "upgradeOptions.recreate":
		return actedIf(value == false)
	case "postRenderStrategy":
		return ignored
	}
	return unknown
}

func actedIf(does bool) verdict {
	if does {
		return acted
	}
	return ignored
}
