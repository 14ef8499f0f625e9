package v1beta1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// MetricSource is a Prometheus-compatible endpoint.
type MetricSource struct {
	// URL of the endpoint, without the path.
	// +kubebuilder:validation:MinLength=1
	URL string `json:"url"`

	// Path of the query API. Default /api/v1/query.
	// +kubebuilder:default:="/api/v1/query"
	// +optional
	Path string `json:"path,omitempty"`

	// SecretRef holds the credentials. In pull mode the Secret is looked for in the member.
	// +optional
	SecretRef *corev1.SecretReference `json:"secretRef,omitempty"`
}

// MetricQuery is one value to ask a MetricSource for.
type MetricQuery struct {
	// Name under which a script finds the value in its global table "metrics".
	Name string `json:"name"`

	// Query in PromQL. One that does not return a scalar fails the check.
	Query string `json:"query"`
}

// JobCheck runs a Job in the cluster and takes its outcome as the outcome of the check.
type JobCheck struct {
	// JobRef holds the manifest of the Job.
	JobRef PolicyRef `json:"jobRef"`

	// Timeout after which the Job counts as failed. Default 5m.
	// +kubebuilder:default:="5m"
	// +optional
	Timeout *metav1.Duration `json:"timeout,omitempty"`
}

// ValidateHealth is one check that gates a feature: before or after it is deployed or withdrawn, depending on the list
// it is in. Every object it selects must pass.
//
// +kubebuilder:validation:XValidation:rule="!has(self.jobCheck) || (!has(self.script) && !has(self.evaluateCEL))",message="jobCheck excludes script and evaluateCEL"
type ValidateHealth struct {
	// Name of the check, shown in messages.
	Name string `json:"name"`

	// FeatureID is the feature the check gates.
	FeatureID FeatureID `json:"featureID"`

	// Group of the objects to look at; empty for the core group.
	// +optional
	Group string `json:"group,omitempty"`

	// Version of the objects to look at.
	// +optional
	Version string `json:"version,omitempty"`

	// Kind of the objects to look at. Empty only if the check looks at metrics or runs a Job.
	// +optional
	Kind string `json:"kind,omitempty"`

	// LabelFilters must all pass. Default: every object passes.
	// +optional
	LabelFilters []LabelFilter `json:"labelFilters,omitempty"`

	// Namespace of the objects. Default: all namespaces.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Script is a Lua script with a function "evaluate" that looks at the globals "obj" and "metrics" and returns a table
	// with the bool "healthy" and, if it likes, a "message".
	// +kubebuilder:validation:MaxLength=262144
	// +optional
	Script string `json:"script,omitempty"`

	// EvaluateCEL is tried in order; the first rule that is true makes the object healthy.
	// +optional
	EvaluateCEL []CELRule `json:"evaluateCEL,omitempty"`

	// MetricSource answers the queries.
	// +optional
	MetricSource *MetricSource `json:"metricSource,omitempty"`

	// MetricQueries are asked before the script runs.
	// +optional
	MetricQueries []MetricQuery `json:"metricQueries,omitempty"`

	// JobCheck runs a Job instead of looking at objects. Excludes script and evaluateCEL.
	// +optional
	JobCheck *JobCheck `json:"jobCheck,omitempty"`
}

// ClusterCheck decides over a cluster as a whole by looking at objects in it.
type ClusterCheck struct {
	// Name of the check, unique in its list.
	Name string `json:"name"`

	// ResourceSelectors pick the objects to look at. One with evaluateCEL fails the check: use evaluate.
	ResourceSelectors []ResourceSelector `json:"resourceSelectors"`

	// Condition is a Lua script with a function "evaluate" that looks at the global "resources", a list of the objects,
	// and returns a table with the bool "pass" and, if it likes, a "message".
	// +kubebuilder:validation:MaxLength=262144
	Condition string `json:"condition"`
}
