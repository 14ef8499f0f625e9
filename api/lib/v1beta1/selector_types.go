package v1beta1

// Operation compares one label of an object.
//
// +kubebuilder:validation:Enum:=Equal;Different;Has;DoesNotHave
type Operation string

// The operations of a LabelFilter.
const (
	// OperationEqual passes objects whose label has the value.
	OperationEqual Operation = "Equal"
	// OperationDifferent passes objects whose label is absent or has another value.
	OperationDifferent Operation = "Different"
	// OperationHas passes objects that carry the label.
	OperationHas Operation = "Has"
	// OperationDoesNotHave passes objects that do not carry the label.
	OperationDoesNotHave Operation = "DoesNotHave"
)

// LabelFilter passes or drops an object by one of its labels.
type LabelFilter struct {
	// Key of the label.
	Key string `json:"key"`

	// Operation to apply to the label.
	Operation Operation `json:"operation"`

	// Value to compare with; unused by Has and DoesNotHave.
	// +optional
	Value string `json:"value,omitempty"`
}

// CELRule is one named condition in the Common Expression Language.
type CELRule struct {
	// Name of the rule, shown in messages.
	Name string `json:"name"`

	// Rule is an expression over the variable "resource", the object at hand. One that does not compile or does not return
	// a bool fails the check.
	Rule string `json:"rule"`
}

// ResourceSelector picks objects of one kind in a cluster.
type ResourceSelector struct {
	// Group of the kind; empty for the core group.
	// +optional
	Group string `json:"group,omitempty"`

	// Version of the kind.
	Version string `json:"version"`

	// Kind of the objects.
	// +kubebuilder:validation:MinLength=1
	Kind string `json:"kind"`

	// LabelFilters must all pass. Default: every object passes.
	// +optional
	LabelFilters []LabelFilter `json:"labelFilters,omitempty"`

	// Namespace of the objects. Default: all namespaces.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the object. Default: any name.
	// +optional
	Name string `json:"name,omitempty"`

	// Evaluate is a Lua script with a function "evaluate" that looks at the global "obj" and returns a table with the bool
	// "matching" and, if it likes, a "message". Default: every object matches.
	// +kubebuilder:validation:MaxLength=262144
	// +optional
	Evaluate string `json:"evaluate,omitempty"`

	// EvaluateCEL is tried in order; the first rule that is true makes the object match. Default: every object matches.
	// +optional
	EvaluateCEL []CELRule `json:"evaluateCEL,omitempty"`
}

// PatchSelector picks objects by identity and metadata. Fields that are set must all match; an empty selector picks
// everything. Group, version, kind, namespace and name are regular expressions matched against the whole value.
type PatchSelector struct {
	// Group of the objects.
	// +optional
	Group string `json:"group,omitempty"`

	// Version of the objects.
	// +optional
	Version string `json:"version,omitempty"`

	// Kind of the objects.
	// +optional
	Kind string `json:"kind,omitempty"`

	// Namespace of the objects.
	// +optional
	Namespace string `json:"namespace,omitempty"`

	// Name of the objects.
	// +optional
	Name string `json:"name,omitempty"`

	// LabelSelector over the labels, in the syntax of "kubectl --selector".
	// +optional
	LabelSelector string `json:"labelSelector,omitempty"`

	// AnnotationSelector over the annotations, in the same syntax.
	// +optional
	AnnotationSelector string `json:"annotationSelector,omitempty"`
}

// Patch changes rendered objects before they are delivered.
type Patch struct {
	// Patch is a strategic merge patch, or a JSON 6902 patch (a list of operations), as YAML or JSON. May be a Go
	// template. One that does not parse or does not apply fails the feature.
	Patch string `json:"patch"`

	// Target picks the objects to patch. Without it, a strategic merge patch changes the object that it names. A JSON 6902
	// patch needs a target.
	// +optional
	Target *PatchSelector `json:"target,omitempty"`
}

// DriftExclusion names parts of deployed objects that others may change.
type DriftExclusion struct {
	// Paths are JSON pointers, for instance "/spec/replicas".
	Paths []string `json:"paths"`

	// Target picks the objects. Default: all objects.
	// +optional
	Target *PatchSelector `json:"target,omitempty"`
}
