package stories

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/towline/towline/internal/localkube"
)

// restoredObject is one object of one profile of TestRestoredHub.
const restoredObject = `
    ---
    apiVersion: v1
    kind: ConfigMap
    metadata: {namespace: default, name: %s}
    data: {version: %q}`

// restoredProfile is a ClusterProfile that deploys objects to the members with the label of its name.
func restoredProfile(name, version string, objects ...string) string {
	content := ""
	for _, object := range objects {
		content += fmt.Sprintf(restoredObject, object, version)
	}
	return fmt.Sprintf(`
apiVersion: v1
kind: ConfigMap
metadata: {namespace: default, name: %[1]s-content}
data:
  objects.yaml: |%[2]s
---
apiVersion: config.projectsveltos.io/v1beta1
kind: ClusterProfile
metadata: {name: %[1]s}
spec:
  clusterSelector: {matchLabels: {%[1]s: deploy}}
  policyRefs: [{kind: ConfigMap, namespace: default, name: %[1]s-content}]
`, name, content)
}

// TestRestoredHub restores the hub's etcd from a snapshot that is several profile changes old. Objects of unknown
// profiles stay on the members and are reported, with the command that withdraws them; known profiles are deployed
// again.
func TestRestoredHub(t *testing.T) {
	awaitSlot(t)
	w := newWorld(t)
	members := map[string]*localkube.Plane{
		"pushed": w.pushMember("fleet", "pushed", "changed=deploy,deleted=deploy,created=deploy,unlabelled=deploy"),
		"pulled": w.pullMember("fleet", "pulled", "changed=deploy,deleted=deploy,created=deploy,unlabelled=deploy"),
	}
	w.apply(w.hub, restoredProfile("changed", "1", "changed"))
	for _, name := range []string{"deleted", "unlabelled", "labelled"} {
		w.apply(w.hub, restoredProfile(name, "1", name))
	}
	for cluster, member := range members {
		w.wantVersions(member, "changed=1", "deleted=1", "unlabelled=1")
		for _, name := range []string{"changed", "deleted", "unlabelled"} {
			w.awaitProvisioned("fleet", name+"-sveltos-"+cluster)
		}
	}
	w.awaitNoBundles()
	snapshot := w.snapshotEtcd()

	w.apply(w.hub, restoredProfile("changed", "2", "changed", "added"))
	w.apply(w.hub, restoredProfile("created", "1", "created"))
	w.kubectl(w.hub, "delete", "clusterprofile", "deleted", "--wait=false")
	w.kubectl(w.hub, "label", "sveltosclusters", "--all", "-n", "fleet", "unlabelled-", "labelled=deploy")
	for cluster, member := range members {
		w.wantVersions(member, "added=2", "changed=2", "created=1", "labelled=1")
		for _, name := range []string{"changed", "created", "labelled"} {
			w.awaitProvisioned("fleet", name+"-sveltos-"+cluster)
		}
	}

	w.hubProcess.kill()
	w.restoreEtcd(snapshot)
	w.startHub()
	for cluster, member := range members {
		w.wantVersions(member, "added=2", "changed=1", "created=1", "deleted=1", "labelled=1", "unlabelled=1")
		for _, name := range []string{"changed", "deleted", "unlabelled"} {
			w.awaitProvisioned("fleet", name+"-sveltos-"+cluster)
		}
		w.eventually("the hub reports the objects of unknown profiles", func() error {
			return errors.Join(
				w.wantText("clustersummary", "changed-sveltos-"+cluster, "{.status.featureSummaries[*].failureMessage}", "ConfigMap default/added"),
				w.wantText("sveltoscluster", cluster, unclaimedMessage, "created-sveltos-"+cluster, "labelled-sveltos-"+cluster, "ClusterProfile created"),
				w.wantText("events", "", "{.items[*].note}{.items[*].message}", "created-sveltos-"+cluster))
		})
	}

	// The command in the condition withdraws one of the bundles; a profile that is created again takes over the other one.
	for cluster := range members {
		message := w.kubectl(w.hub, "get", "sveltoscluster", cluster, "-n", "fleet", "-o", "jsonpath="+unclaimedMessage)
		_, command, _ := strings.Cut(message, "run: ")
		args := strings.Fields(strings.Replace(command, ",labelled-sveltos-"+cluster, "", 1))
		w.run(w.hub, args[0], args[1:]...)
	}
	for _, member := range members {
		w.wantVersions(member, "added=2", "changed=1", "deleted=1", "labelled=1", "unlabelled=1")
	}
	w.kubectl(w.hub, "label", "sveltosclusters", "--all", "-n", "fleet", "labelled=deploy")
	for cluster := range members {
		w.awaitProvisioned("fleet", "labelled-sveltos-"+cluster)
		w.eventually("nothing is unclaimed any more", func() error {
			out, err := w.try(w.hub, "kubectl", "get", "sveltoscluster", cluster, "-n", "fleet", "-o", "jsonpath={.status.conditions}{.metadata.annotations.towline\\.dev/withdraw}")
			if err == nil && strings.Trim(out, "[]") != "" {
				err = fmt.Errorf("cluster %s: %s", cluster, out)
			}
			return err
		})
	}

	// A deregistration withdraws all objects, also the ones of a later version.
	for cluster, member := range members {
		w.run(w.hub, "sveltosctl", "deregister", "cluster", "--namespace=fleet", "--cluster="+cluster)
		w.wantVersions(member)
	}
}

// unclaimedMessage is the path of the message about the objects of unknown profiles.
const unclaimedMessage = `{.status.conditions[?(@.type=="UnclaimedBundles")].message}`

// wantText returns an error unless a field of an object in namespace fleet has all texts.
func (w *world) wantText(kind, name, path string, texts ...string) error {
	args := []string{"get", kind, "-n", "fleet", "-o", "jsonpath=" + path}
	if name != "" {
		args = append(args, name)
	}
	out, err := w.try(w.hub, "kubectl", args...)
	for _, text := range texts {
		if err == nil && !strings.Contains(out, text) {
			err = fmt.Errorf("%s %s has %q, want %q in it", kind, name, out, text)
		}
	}
	return err
}

// wantVersions waits until a member has exactly these ConfigMaps in its namespace default, as name=version.
func (w *world) wantVersions(member *localkube.Plane, want ...string) {
	w.t.Helper()
	w.eventually("the versions on "+member.Name, func() error {
		out, err := w.try(member, "kubectl", "get", "configmaps", "-n", "default", "--field-selector=metadata.name!=kube-root-ca.crt",
			"-o", `jsonpath={range .items[*]}{.metadata.name}={.data.version}{" "}{end}`)
		if err == nil && strings.TrimSpace(out) != strings.Join(want, " ") {
			err = fmt.Errorf("got %q, want %q", out, want)
		}
		return err
	})
}

// snapshotEtcd stops the hub's API server, copies its etcd, and starts it again. It returns the directory of the copy.
func (w *world) snapshotEtcd() string {
	w.t.Helper()
	dir := filepath.Join(w.dir, "snapshot")
	w.whileStopped(func() error { return os.CopyFS(dir, os.DirFS(filepath.Join(w.hub.Dir, "etcd"))) })
	return dir
}

// restoreEtcd replaces the hub's etcd by a copy.
func (w *world) restoreEtcd(dir string) {
	w.t.Helper()
	etcd := filepath.Join(w.hub.Dir, "etcd")
	w.whileStopped(func() error { return errors.Join(os.RemoveAll(etcd), os.CopyFS(etcd, os.DirFS(dir))) })
}

// whileStopped calls do while the hub's API server is stopped.
func (w *world) whileStopped(do func() error) {
	w.t.Helper()
	err := w.hub.Kill()
	if err == nil {
		err = do()
	}
	if err == nil {
		err = w.hub.Restart(w.t.Context())
	}
	if err != nil {
		w.t.Fatal(err)
	}
}
