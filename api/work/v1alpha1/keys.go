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

// ExecutionFinalizer on a Work keeps it until its manifests are withdrawn.
const ExecutionFinalizer = "karmada.io/execution-controller"

// Marks on the objects that come from a Work.
const (
	ManagedLabel            = "karmada.io/managed" // "true"
	PermanentIDLabel        = "work.karmada.io/permanent-id"
	WorkNameAnnotation      = "work.karmada.io/name"
	WorkNamespaceAnnotation = "work.karmada.io/namespace"
	// ConflictResolutionAnnotation on a manifest, or on the Work, determines whether an existing object that is not
	// managed is
	// taken over.
	ConflictResolutionAnnotation = "work.karmada.io/conflict-resolution"
)

// Values of ConflictResolutionAnnotation.
const (
	ConflictAbort     = "abort" // do not change it, and report a conflict; the default
	ConflictOverwrite = "overwrite"
)
