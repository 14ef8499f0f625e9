package bundle

import (
	"time"

	"github.com/towline/towline/internal/kube"
)

// State is the state of a bundle on a member.
type State string

// The states of a Report.
const (
	StatePending  State = "Pending"  // the member has not reported that it applies the bundle
	StateApplying State = "Applying" // the member is applying it
	StateApplied  State = "Applied"  // the member equals the bundle
	StateFailed   State = "Failed"   // applying failed and is retried; Message has the reason
	StateMissing  State = "Missing"  // the member lacks the content, and the hub must deliver it again
	StateRemoving State = "Removing"
	StateRemoved  State = "Removed"
)

// Report is the report of a member about one bundle.
type Report struct {
	ID     ID
	Digest Digest // the digest of the reported bundle; zero if the member does not know it
	State  State
	// Message depends on State. StateFailed: the object and the reason; the same problem has the same message.
	// StateApplying: the hook or object that a Helm release waits for. StateApplied: KeptPrefix and the kept objects, ""
	// if there are none.
	Message string
	// Kinds are the kinds of the deployed objects, as "Kind.version.group", sorted.
	Kinds []string
	// LastApplied is the time when the bundle was last applied completely; zero if never.
	LastApplied time.Time
	// Outdated are the Helm releases that the member has not started to deploy, if the hub must render one of them again.
	// The member waits with all of them for another bundle.
	Outdated []OutdatedRelease
	// Changes are the changes of the last run. In pull mode the hub does not get them.
	Changes ChangeSet
}

// OutdatedRelease is a Helm release that the member has not started to deploy. The hub must render it with Revision and
// IsUpgrade, which follow from the release records of the member. Revision is 0 if the records were not compared yet.
type OutdatedRelease struct {
	Namespace string
	Name      string
	Revision  int
	IsUpgrade bool
}

// KeptPrefix is the prefix of the message about kept objects, see Bundle.KeepObjects.
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

// Change is the action of a run on one object. Reason may be "".
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
