package bundle

import (
	"time"

	"github.com/towline/towline/internal/kube"
)

// State is the state of a bundle on a member.
type State string

// The states of a Report.
const (
	StatePending  State = "Pending"  // it is delivered, or is being delivered; the member has not reported a start
	StateApplying State = "Applying" // the member is applying it
	StateApplied  State = "Applied"  // the member equals the bundle
	StateFailed   State = "Failed"   // applying failed and is retried; Message has the reason
	StateMissing  State = "Missing"  // the member needs the content again
	StateRemoving State = "Removing"
	StateRemoved  State = "Removed"
)

// Report is the report of a member about one bundle.
type Report struct {
	ID     ID
	Digest Digest // of the bundle that the report is about; zero if the member has none
	State  State
	// Message depends on State. StateFailed: the object and the reason; the same problem has the same message.
	// StateApplying: the hook or object that a Helm release waits for. StateApplied: it begins with KeptPrefix if objects
	// are kept.
	Message string
	// Kinds are the kinds of the deployed objects, as "Kind.version.group", sorted.
	Kinds []string
	// LastApplied is the time when the bundle was last applied completely; zero if never.
	LastApplied time.Time
	// Outdated are the Helm releases whose revision the member has not begun, if the hub must render one of them again.
	// The member begins none of them before it gets another bundle.
	Outdated []OutdatedRelease
	// Changes are the changes of the last run. They are not sent to the hub in pull mode.
	Changes ChangeSet
}

// OutdatedRelease is a Helm release whose revision has not begun. Its templates must read Revision and IsUpgrade, which
// come after the release records of the member. Revision is 0 if they were not compared yet.
type OutdatedRelease struct {
	Namespace string
	Name      string
	Revision  int
	IsUpgrade bool
}

// KeptPrefix is the begin of the message about kept objects (see Bundle.KeepObjects).
const KeptPrefix = "the hub delivers an older version than the cluster has, as after a restore from a backup; " +
	"kept until the profile is withdrawn, or deleted by hand: "

// Action is the action of a run on one object.
type Action string

// The actions of a Change.
const (
	Created    Action = "created"
	Configured Action = "configured"
	Unchanged  Action = "unchanged"
	Deleted    Action = "deleted"
	Skipped    Action = "skipped" // not changed; Reason has the reason
	Failed     Action = "failed"  // Reason has the error
)

// Change is the action of a run on one object, with the reason if it is not obvious.
type Change struct {
	Ref    kube.Ref
	Action Action
	Reason string
}

// ChangeSet lists the changes of a run in their order.
type ChangeSet []Change

// Count returns the number of changes with the action a.
func (cs ChangeSet) Count(a Action) int {
	n := 0
	for _, c := range cs {
		if c.Action == a {
			n++
		}
	}
	return n
}
