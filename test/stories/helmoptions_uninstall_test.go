package stories

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// remove deletes the profile, and waits until the release is withdrawn.
func (s *optionStory) remove() {
	s.t.Helper()
	s.beginRemoval()
	s.awaitRemoved()
}

func (s *optionStory) beginRemoval() {
	s.t.Helper()
	s.kubectl(s.hub, "delete", "clusterprofile", s.profile(), "--wait=false")
}

func (s *optionStory) awaitRemoved() {
	s.t.Helper()
	s.eventually("the release is withdrawn", func() error {
		return errors.Join(s.wantMissing(s.hub, &configv1beta1.ClusterSummary{}, s.summary(), "fleet"), s.wantMissing(s.plane, &corev1.ConfigMap{}, "main", s.release))
	})
}

// keepsHistory uninstalls the release with its records, and deploys it again with the same name.
func (s *optionStory) keepsHistory() {
	s.t.Helper()
	options := map[string]any{"installOptions": map[string]any{"replace": true}, "uninstallOptions": map[string]any{"keepHistory": true}}
	s.upgrade(1, options)
	s.awaitRevision(1)
	s.remove()
	s.wantHistory("1 uninstalled")
	s.upgrade(2, options)
	s.awaitRevision(2)
	s.wantHistory("1 uninstalled", "2 deployed")
	var got []string
	for _, line := range s.log.list(0) {
		if event, ok := strings.CutPrefix(line, "created hook-"); ok {
			got = append(got, event)
		}
	}
	if diff := cmp.Diff([]string{"pre-install", "pre-delete", "pre-install"}, got); diff != "" {
		s.t.Errorf("hooks on %s (-want +got):\n%s", s.cluster, diff)
	}
}

// wantHistory checks the revisions that helm history prints, as "revision status".
func (s *optionStory) wantHistory(want ...string) {
	s.t.Helper()
	var got []string
	for line := range strings.Lines(s.run(s.plane, "helm", "history", s.release, "-n", s.release)) {
		if columns := strings.Split(line, "\t"); len(columns) > 2 && strings.TrimSpace(columns[0]) != "REVISION" {
			got = append(got, strings.TrimSpace(columns[0])+" "+strings.TrimSpace(columns[2]))
		}
	}
	if !slices.Equal(want, got) {
		s.t.Errorf("helm history on %s prints %q, want %q", s.cluster, got, want)
	}
}

// deployWithReplicaSet deploys the release, and waits until its Deployment has a ReplicaSet.
func (s *optionStory) deployWithReplicaSet(propagation string) {
	s.t.Helper()
	s.upgrade(1, map[string]any{"uninstallOptions": map[string]any{"deletionPropagation": propagation}})
	s.awaitRevision(1)
	s.eventually("the Deployment has a ReplicaSet", func() error {
		out, err := s.try(s.plane, "kubectl", "get", "replicasets", "-n", s.release, "-o", "name")
		if err == nil && out == "" {
			err = errors.New("no ReplicaSet exists")
		}
		return err
	})
}

func (s *optionStory) orphansDependents() {
	s.t.Helper()
	s.deployWithReplicaSet("orphan")
	s.remove()
	if err := s.wantMissing(s.plane, &appsv1.Deployment{}, s.release, s.release); err != nil {
		s.t.Error(err)
	}
	if out := s.kubectl(s.plane, "get", "replicasets", "-n", s.release, "-o", `jsonpath={.items[*].metadata.ownerReferences}`); out != "" {
		s.t.Errorf("the ReplicaSet is owned by %s", out)
	}
	if out := s.kubectl(s.plane, "get", "replicasets", "-n", s.release, "-o", "name"); out == "" {
		s.t.Error("the ReplicaSet was deleted")
	}
}

// deletesDependents uninstalls the release while a finalizer delays the deletion of its ReplicaSet. Only with
// foreground propagation, the Deployment waits for that.
func (s *optionStory) deletesDependents(propagation string) {
	s.t.Helper()
	s.deployWithReplicaSet(propagation)
	hold := func(finalizers string) {
		s.t.Helper()
		s.kubectl(s.plane, "patch", s.onlyObject("replicasets"), "-n", s.release, "--type=merge", "-p", `{"metadata":{"finalizers":`+finalizers+`}}`)
	}
	hold(`["stories.towline.dev/hold"]`)
	s.beginRemoval()
	s.eventually("the ReplicaSet is being deleted", func() error {
		out, err := s.try(s.plane, "kubectl", "get", "replicasets", "-n", s.release, "-o", "jsonpath={.items[*].metadata.deletionTimestamp}")
		if err == nil && out == "" {
			err = errors.New("it has no deletionTimestamp")
		}
		return err
	})
	existsErr := s.wantMissing(s.plane, &appsv1.Deployment{}, s.release, s.release)
	if waits := propagation == "foreground"; (existsErr != nil) != waits {
		s.t.Errorf("%s on %s: the Deployment waits for its ReplicaSet: %t, want %t", propagation, s.cluster, existsErr != nil, waits)
	}
	hold("null")
	s.awaitRemoved()
	s.eventually("the Deployment and the ReplicaSet are deleted", func() error {
		out, err := s.try(s.plane, "kubectl", "get", "deployments,replicasets", "-n", s.release, "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("objects still exist: %s", out)
		}
		return err
	})
}

// onlyObject returns the only object of a kind in the namespace of the release, as kubectl names it.
func (s *optionStory) onlyObject(kind string) string {
	s.t.Helper()
	return strings.TrimSpace(s.kubectl(s.plane, "get", kind, "-n", s.release, "-o", "name"))
}
