package drift

import (
	"testing"

	"github.com/towline/towline/internal/inventory"
)

func TestIsDrifted(t *testing.T) {
	t.Parallel()
	applied := inventory.Entry{UID: "u", Fingerprint: "f"}
	same := observation{uid: "u", fingerprint: "f", ownerKeyHash: "mine"}
	with := func(change func(*observation)) observation {
		o := same
		change(&o)
		return o
	}
	releaseRecord := inventory.Entry{UID: "u", Fingerprint: "f", IsHelmSecret: true}
	for name, test := range map[string]struct {
		entry    inventory.Entry
		observed observation
		want     bool
	}{
		"as applied":                             {applied, same, false},
		"fields changed":                         {applied, with(func(o *observation) { o.fingerprint = "g" }), true},
		"fields changed, drift ignored":          {applied, with(func(o *observation) { o.fingerprint, o.ignored = "g", true }), false},
		"deleted":                                {applied, observation{deleted: true, uid: "u"}, true},
		"deleted, not in a list":                 {applied, observation{deleted: true}, true},
		"deleted, but another object":            {applied, observation{deleted: true, uid: "v"}, false},
		"deleted, UID not recorded":              {inventory.Entry{}, observation{deleted: true, uid: "v"}, true},
		"created again with our annotations":     {applied, with(func(o *observation) { o.uid = "v" }), true},
		"created again by others":                {applied, observation{uid: "v"}, false},
		"annotations of another bundle":          {applied, with(func(o *observation) { o.ownerKeyHash = "x" }), true},
		"taken over by a rival":                  {inventory.Entry{CompetingOwner: "x"}, observation{deleted: true}, false},
		"release record, annotations removed":    {releaseRecord, with(func(o *observation) { o.ownerKeyHash = "" }), false},
		"release record, changed by a client":    {releaseRecord, with(func(o *observation) { o.fingerprint, o.ownerKeyHash = "g", "" }), true},
		"release record, created again by Helm":  {releaseRecord, observation{uid: "v"}, true},
		"release record, not in a list any more": {releaseRecord, observation{deleted: true}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := isDrifted(test.entry, test.observed, "mine"); got != test.want {
				t.Errorf("got %t, want %t", got, test.want)
			}
		})
	}
}
