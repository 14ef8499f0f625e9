package render

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// Unsupported returns the JSON paths of the fields in spec that Towline does not support yet, sorted, for example
// "spec.dependsOn" and "spec.helmCharts[0].options.wait". Fields with their default value are supported. The
// caller must reject a profile with an unsupported field: no field is silently ignored.
func Unsupported(spec configv1beta1.ProfileSpec) []string {
	raw, err := json.Marshal(spec)
	if err != nil {
		return []string{"spec"} // it cannot be encoded
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		return []string{"spec"}
	}
	var paths []string
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		paths = append(paths, unsupportedPaths("spec."+name, name, fields[name])...)
	}
	slices.Sort(paths)
	return paths
}

// support is the support of one field.
type support string

const (
	supported   support = "supported"   // with all fields below it
	nested      support = "nested"      // each field below it has its own support
	unsupported support = "unsupported" // Towline does not implement it, or no rule lists it
)

// unsupportedPaths returns the unsupported paths at or below path. pattern is path without "spec." and without indices.
// The JSON of the spec has no unset fields, so an empty value is also checked: the user has set it.
func unsupportedPaths(path, pattern string, value any) []string {
	switch supportOf(pattern, value) {
	case supported:
		return nil
	case nested:
		return unsupportedPathsBelow(path, pattern, value)
	}
	return []string{path}
}

func unsupportedPathsBelow(path, pattern string, value any) []string {
	var paths []string
	switch value := value.(type) {
	case map[string]any:
		for name, field := range value {
			paths = append(paths, unsupportedPaths(path+"."+name, pattern+"."+name, field)...)
		}
	case []any:
		for i, item := range value {
			paths = append(paths, unsupportedPathsBelow(fmt.Sprintf("%s[%d]", path, i), pattern+"[]", item)...)
		}
	}
	return paths
}

// supportOf returns the support of the field at pattern with this value.
func supportOf(pattern string, value any) support {
	list, field, inItem := strings.Cut(pattern, "[].")
	switch {
	case !inItem:
		return supportOfSpec(pattern, value)
	case list == "policyRefs":
		return supportOfPolicyRef(field)
	case list == "templateResourceRefs":
		return supportOfResourceRef(field)
	case list == "helmCharts":
		if option, ok := strings.CutPrefix(field, "options."); ok {
			return supportOfHelmOption(option, value)
		}
		return supportOfHelmChart(field)
	case list == "kustomizationRefs":
		return supportOfKustomizationRef(field)
	}
	return unsupported
}

func supportOfSpec(field string, value any) support {
	switch field {
	case "clusterSelector", "clusterRefs", "tier", "continueOnConflict", "continueOnError", "stopMatchingBehavior",
		"patches", "patchesFrom", "extraLabels", "extraAnnotations", "driftExclusions":
		return supported
	case "syncMode":
		return supportedIf(value != string(configv1beta1.SyncModeDryRun))
	case "policyRefs", "helmCharts", "kustomizationRefs", "templateResourceRefs":
		return nested
	case "reloader":
		return supportedIf(value == false)
	}
	return unsupported
}

func supportOfPolicyRef(field string) support {
	switch field {
	case "kind", "namespace", "name", "path", "optional", "tier", "skipNamespaceCreation", "force", "remoteURL", "deploymentType":
		return supported
	}
	return unsupported
}

// supportOfKustomizationRef returns the support of a field of a kustomizationRef, which has the sources of a policyRef
// too.
func supportOfKustomizationRef(field string) support {
	switch field {
	case "path", "components", "targetNamespace", "values", "valuesFrom":
		return supported
	}
	return supportOfPolicyRef(field)
}

func supportOfResourceRef(field string) support {
	switch field {
	case "identifier", "optional", "ignoreStatusChanges", "watchFields", "resource":
		return supported
	}
	return unsupported
}

func supportOfHelmChart(field string) support {
	switch field {
	case "repositoryURL", "repositoryName", "chartName", "chartVersion", "releaseName", "releaseNamespace", "values", "valuesFrom", "helmChartAction",
		"registryCredentialsConfig", "signatureVerification", "provenanceVerification":
		return supported
	case "options":
		return nested
	}
	return unsupported
}

// supportOfHelmOption returns the support of an option of a chart. The doc comments of the API have the reasons.
func supportOfHelmOption(option string, value any) support {
	switch option {
	case "skipCRDs", "skipSchemaValidation", "disableHooks", "passCredentialsAll", "wait", "waitForJobs", "timeout", "atomic", "runTests",
		"labels", "description", "postRenderStrategy",
		"installOptions.createNamespace", "installOptions.disableHooks", "installOptions.recoverAfterConsecutiveFailures",
		"upgradeOptions.force", "upgradeOptions.maxHistory", "upgradeOptions.cleanupOnFail", "upgradeOptions.subNotes",
		"upgradeOptions.disableHooks", "upgradeOptions.upgradeCRDs",
		"uninstallOptions.keepHistory", "uninstallOptions.deletionPropagation", "uninstallOptions.disableHooks":
		return supported
	case "installOptions.takeOwnership", "upgradeOptions.takeOwnership":
		return supported // Towline always takes ownership; false can also be the default, so it is no error
	case "upgradeOptions.resetValues":
		return supported // always true: a bundle has no values of earlier releases
	case "installOptions", "upgradeOptions", "uninstallOptions":
		return nested
	case "installOptions.replace":
		return supportedIf(value == true)
	case "disableOpenAPIValidation", "enableClientCache", "dependencyUpdate", "upgradeOptions.reuseValues", "upgradeOptions.resetThenReuseValues", "upgradeOptions.recreate":
		return supportedIf(value == false)
	}
	return unsupported
}

func supportedIf(condition bool) support {
	if condition {
		return supported
	}
	return unsupported
}
