package v1alpha1

// Types of the conditions of a Work.
const (
	WorkApplied     = "Applied"
	WorkDispatching = "Dispatching"
)

// Reasons of those conditions.
const (
	ReasonAppliedSuccessful  = "AppliedSuccessful"
	ReasonAppliedFailed      = "AppliedFailed"
	ReasonDispatching        = "Dispatching"
	ReasonSuspendDispatching = "SuspendDispatching"
)

// ExecutionFinalizer on a Work lets whoever executes it withdraw its manifests before it goes.
const ExecutionFinalizer = "karmada.io/execution-controller"

// Marks on the objects that come from a Work.
const (
	ManagedLabel            = "karmada.io/managed" // "true"
	PermanentIDLabel        = "work.karmada.io/permanent-id"
	WorkNameAnnotation      = "work.karmada.io/name"
	WorkNamespaceAnnotation = "work.karmada.io/namespace"
	// ConflictResolutionAnnotation on a manifest, or on the Work, says what to do with an object that is there and is not managed.
	ConflictResolutionAnnotation = "work.karmada.io/conflict-resolution"
)

// Values of ConflictResolutionAnnotation.
const (
	ConflictAbort     = "abort" // leave it alone and say so; the default
	ConflictOverwrite = "overwrite"
)
