package stories

import (
	"regexp"
	"strconv"
)

// killPoint is a request at which a victim is killed with -9.
type killPoint struct {
	name string
	requestMatch
	victim
}

// killAt begins an operation and kills the victims at their requests in it, one after the other.
func (s *hookStory) killAt(begin func(), all ...killPoint) {
	s.t.Helper()
	next := begin
	for _, k := range all {
		blocked := s.gate.block(k.requestMatch)
		next()
		s.t.Logf("kill %s", k.name)
		s.awaitBlocked(blocked)
		k.kill()
		next = k.start
	}
	next()
}

// Requests at which processes are killed.
var (
	hookJobs      = regexp.MustCompile(`/namespaces/hooked/jobs$`)
	hookRecords   = regexp.MustCompile(`/namespaces/hooked/secrets$`)
	hookRecord    = regexp.MustCompile(`/namespaces/hooked/secrets/sh\.helm\.release\.v1\.`)
	hookedObjects = regexp.MustCompile(`/namespaces/hooked/configmaps/revision$`)
)

// hookJob matches the path of the Job of a hook.
func hookJob(name string) *regexp.Regexp {
	return regexp.MustCompile(`/namespaces/hooked/jobs/` + name + `$`)
}

// killDuringInstall installs the release, and kills the deploying process several times meanwhile.
func (s *hookStory) killDuringInstall() {
	s.t.Helper()
	s.killAt(func() { s.upgrade(nil) },
		killPoint{"after the revision was recorded, response lost", requestMatch{method: "POST", path: hookRecords, answered: true}, s.deployer},
		killPoint{"after a hook was created, response lost", requestMatch{method: "POST", path: hookJobs, body: "hook-pre-install-early", answered: true}, s.both},
		killPoint{"between the hooks before and the hooks after", requestMatch{method: "PATCH", path: hookedObjects}, s.deployer},
		killPoint{"before the last test is created", requestMatch{method: "POST", path: hookJobs, body: "hook-test-late"}, s.deployer},
	)
}

// killDuringUpgrade kills the deploying process between any two steps of an upgrade, in pull mode every other time
// together with the hub. In some upgrades only the hub is killed later, and the agent continues. Each hook runs once,
// and the upgrade is one revision.
func (s *hookStory) killDuringUpgrade() {
	s.t.Helper()
	early := hookJob("hook-pre-upgrade-early")
	for i, upgrade := range []struct {
		name string
		requestMatch
		later *requestMatch // at which only the hub is killed, in pull mode
	}{
		{"before the revision is recorded", requestMatch{method: "POST", path: hookRecords}, &requestMatch{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early"}},
		{"after the revision was recorded, response lost", requestMatch{method: "POST", path: hookRecords, answered: true}, &requestMatch{method: "DELETE", path: early, answered: true}},
		{"before a hook is created", requestMatch{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early"}, &requestMatch{method: "DELETE", path: early}},
		{"after a hook was created, response lost", requestMatch{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early", answered: true}, &requestMatch{method: "PATCH", path: hookedObjects}},
		{"while a hook runs", requestMatch{method: "GET", path: early, nth: 2}, &requestMatch{method: "POST", path: hookJobs, body: "hook-post-upgrade-late"}},
		{"after a hook has ended, before that is recorded", requestMatch{method: "PUT", path: recordPath, nth: 4}, nil},
		{"before a hook is deleted", requestMatch{method: "DELETE", path: early}, &requestMatch{method: "PUT", path: hookRecord}},
		{"after a hook was deleted, response lost", requestMatch{method: "DELETE", path: early, answered: true}, nil},
		{"between the hooks before and the hooks after", requestMatch{method: "PATCH", path: hookedObjects}, nil},
		{"after the objects were applied, response lost", requestMatch{method: "PATCH", path: hookedObjects, answered: true}, nil},
		{"before the last hook is created", requestMatch{method: "POST", path: hookJobs, body: "hook-post-upgrade-late"}, nil},
		{"before the revision is recorded as deployed", requestMatch{method: "PUT", path: hookRecord}, nil},
		{"after the revision was recorded as deployed, response lost", requestMatch{method: "PUT", path: hookRecord, answered: true}, nil},
	} {
		all := []killPoint{{upgrade.name, upgrade.requestMatch, []victim{s.deployer, s.both}[i%2]}}
		if s.hubAlone.kill != nil && upgrade.later != nil {
			all = append(all, killPoint{"later", *upgrade.later, s.hubAlone})
		}
		s.killAt(func() { s.upgrade(map[string]any{"others": false, "events": []string{"pre-upgrade", "post-upgrade"}}) }, all...)
		s.awaitRevision(s.revision)
		for _, hook := range []string{"hook-pre-upgrade-sub", "hook-pre-upgrade-early", "hook-pre-upgrade-late", "hook-post-upgrade-sub", "hook-post-upgrade-early", "hook-post-upgrade-late"} {
			if n := s.log.count("created", hook, strconv.Itoa(s.revision)); n != 1 {
				s.t.Errorf("killed %s: %s ran %d times on %s", upgrade.name, hook, n, s.cluster)
			}
		}
	}
}

// killDuringUninstall begins to uninstall the release, and kills the deploying process several times meanwhile. half is
// killed after half of the steps.
func (s *hookStory) killDuringUninstall(half victim) {
	s.t.Helper()
	s.killAt(func() { s.kubectl(s.hub, "delete", "clusterprofile", s.profile(), "--wait=false") },
		killPoint{"after a hook was created, response lost", requestMatch{method: "POST", path: hookJobs, body: "hook-pre-delete-early", answered: true}, s.both},
		killPoint{"between the hooks before and the hooks after", requestMatch{method: "DELETE", path: hookedObjects}, half},
		killPoint{"before the last hook is created", requestMatch{method: "POST", path: hookJobs, body: "hook-post-delete-late"}, s.deployer},
		killPoint{"after the release records were deleted, response lost", requestMatch{method: "DELETE", path: hookRecord, answered: true}, s.deployer},
	)
}
