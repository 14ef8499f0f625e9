package stories

import (
	"regexp"
	"strconv"
)

// killing kills a process with -9 at a moment.
type killing struct {
	name string
	moment
	victim
}

// killedAt begins an operation and kills the victims at their moments in it, one after the other.
func (s *hookStory) killedAt(begin func(), all ...killing) {
	s.t.Helper()
	next := begin
	for _, k := range all {
		trap := s.gate.hold(k.moment)
		next()
		s.t.Logf("kill %s", k.name)
		s.wait(trap)
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

// killedWhileInstalled installs the release, and kills the deploying process several times meanwhile.
func (s *hookStory) killedWhileInstalled() {
	s.t.Helper()
	s.killedAt(func() { s.upgrade(nil) },
		killing{"after the revision was recorded, unheard", moment{method: "POST", path: hookRecords, answered: true}, s.deployer},
		killing{"after a hook was created, unheard", moment{method: "POST", path: hookJobs, body: "hook-pre-install-early", answered: true}, s.both},
		killing{"between the hooks before and those after", moment{method: "PATCH", path: hookedObjects}, s.deployer},
		killing{"before the last test is created", moment{method: "POST", path: hookJobs, body: "hook-test-late"}, s.deployer},
	)
}

// killedWhileUpgraded kills the deploying process between any two steps of an upgrade, in pull mode every other time
// together with the hub. In some upgrades the hub alone is killed later, and the agent continues. Each hook runs once
// all the same, and it stays one revision.
func (s *hookStory) killedWhileUpgraded() {
	s.t.Helper()
	early := hookJob("hook-pre-upgrade-early")
	for i, upgrade := range []struct {
		name string
		moment
		later *moment // at which the hub is killed alone, in pull mode
	}{
		{"before the revision is recorded", moment{method: "POST", path: hookRecords}, &moment{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early"}},
		{"after the revision was recorded, unheard", moment{method: "POST", path: hookRecords, answered: true}, &moment{method: "DELETE", path: early, answered: true}},
		{"before a hook is created", moment{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early"}, &moment{method: "DELETE", path: early}},
		{"after a hook was created, unheard", moment{method: "POST", path: hookJobs, body: "hook-pre-upgrade-early", answered: true}, &moment{method: "PATCH", path: hookedObjects}},
		{"while a hook runs", moment{method: "GET", path: early, nth: 2}, &moment{method: "POST", path: hookJobs, body: "hook-post-upgrade-late"}},
		{"after a hook has ended, before that is noted", moment{method: "PUT", path: recordPath, nth: 4}, nil},
		{"before a hook is deleted", moment{method: "DELETE", path: early}, &moment{method: "PUT", path: hookRecord}},
		{"after a hook was deleted, unheard", moment{method: "DELETE", path: early, answered: true}, nil},
		{"between the hooks before and those after", moment{method: "PATCH", path: hookedObjects}, nil},
		{"after the objects were applied, unheard", moment{method: "PATCH", path: hookedObjects, answered: true}, nil},
		{"before the last hook is created", moment{method: "POST", path: hookJobs, body: "hook-post-upgrade-late"}, nil},
		{"before the revision is recorded as deployed", moment{method: "PUT", path: hookRecord}, nil},
		{"after the revision was recorded as deployed, unheard", moment{method: "PUT", path: hookRecord, answered: true}, nil},
	} {
		all := []killing{{upgrade.name, upgrade.moment, []victim{s.deployer, s.both}[i%2]}}
		if s.bystander.kill != nil && upgrade.later != nil {
			all = append(all, killing{"later", *upgrade.later, s.bystander})
		}
		s.killedAt(func() { s.upgrade(map[string]any{"others": false, "events": []string{"pre-upgrade", "post-upgrade"}}) }, all...)
		s.deployed(s.revision)
		for _, hook := range []string{"hook-pre-upgrade-sub", "hook-pre-upgrade-early", "hook-pre-upgrade-late", "hook-post-upgrade-sub", "hook-post-upgrade-early", "hook-post-upgrade-late"} {
			if n := s.log.count("created", hook, strconv.Itoa(s.revision)); n != 1 {
				s.t.Errorf("killed %s: %s ran %d times on %s", upgrade.name, hook, n, s.cluster)
			}
		}
	}
}

// killedWhileUninstalled begins to uninstall the release, and kills the deploying process several times meanwhile. half
// is killed after half of the steps.
func (s *hookStory) killedWhileUninstalled(half victim) {
	s.t.Helper()
	s.killedAt(func() { s.kubectl(s.hub, "delete", "clusterprofile", s.profile(), "--wait=false") },
		killing{"after a hook was created, unheard", moment{method: "POST", path: hookJobs, body: "hook-pre-delete-early", answered: true}, s.both},
		killing{"between the hooks before and those after", moment{method: "DELETE", path: hookedObjects}, half},
		killing{"before the last hook is created", moment{method: "POST", path: hookJobs, body: "hook-post-delete-late"}, s.deployer},
		killing{"after the release records were deleted, unheard", moment{method: "DELETE", path: hookRecord, answered: true}, s.deployer},
	)
}
