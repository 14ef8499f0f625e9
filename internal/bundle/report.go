package bundle

import (
	"time"

	"github.com/towline/towline/internal/kube"
)

// State says how far a member is with a bundle.
type State string

// The states of a Report.
const (
	StatePending  State = "Pending"  // delivered or being delivered; the member has not begun, as far as is known
	StateApplying State = "Applying" // the member is at work
	StateApplied  State = "Applied"  // the member equals the bundle
	StateFailed   State = "Failed"   // the member tried; Message says what is wrong; it tries again
	StateMissing  State = "Missing"  // the member needs the content again
	StateRemoving State = "Removing"
	StateRemoved  State = "Removed"
)

// Report is what a member says of one bundle.
type Report struct {
	ID     ID
	Digest Digest // of the bundle that the report is about; zero if the member has seen none
	State  State
	// Message depends on State. StateFailed: the object and the reason; the same problem has the same message.
	// StateApplying: the hook or object that a Helm release waits for. StateApplied: it begins with KeptPrefix if objects
	// are kept.
	Message string
	// Kinds are the kinds now deployed, as "Kind.version.group", sorted.
	Kinds []string
	// LastApplied is when the member last equalled the bundle; zero if never.
	LastApplied time.Time
	// Changes is what the last pass did; only transports that run the engine themselves fill it.
	Changes ChangeSet
}

// KeptPrefix begins the message about objects that a bundle lacks and that are kept all the same (see Bundle.KeepObjects).
const KeptPrefix = "the hub delivers an older version than the cluster has, as after a restore from a backup; " +
	"kept until the profile is withdrawn, or deleted by hand: "

// Action is what a pass did with one object.
type Action string

// The actions of a Change.
const (
	Created    Action = "created"
	Configured Action = "configured"
	Unchanged  Action = "unchanged"
	Deleted    Action = "deleted"
	Skipped    Action = "skipped" // left alone on purpose; Reason says why
	Failed     Action = "failed"  // Reason says why
)

// Change is what a pass did with one object, and why where that is not plain.
type Change struct {
	Ref    kube.Ref
	Action Action
	Reason string
}

// ChangeSet lists what a pass did, in the order in which it was done.
type ChangeSet []Change

// Count returns how many changes have the action a.
func (cs ChangeSet) Count(a Action) int {
	n := 0
	for _, c := range cs {
		if c.Action == a {
			n++
		}
	}
	return n
}
