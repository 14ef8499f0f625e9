package hub_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/examples"
	"github.com/towline/towline/internal/hub"
)

// listInventories lists the Secrets with the engine's inventories on the control plane.
func (w *world) listInventories() []corev1.Secret {
	w.Helper()
	var secrets corev1.SecretList
	w.must(w.List(w.Context(), &secrets, client.HasLabels{"towline.dev/record"}))
	return secrets.Items
}

// loseInventories deletes the inventories of the engine.
func (w *world) loseInventories() {
	w.Helper()
	lost := w.listInventories()
	if len(lost) == 0 {
		w.Fatal("there is no inventory")
	}
	for i := range lost {
		w.must(w.Delete(w.Context(), &lost[i]))
	}
}

// listReleaseRecords lists the records of release hello as "version status".
func (w *world) listReleaseRecords() ([]string, error) {
	var secrets corev1.SecretList
	err := w.List(w.Context(), &secrets, client.InNamespace("hello"), client.MatchingLabels{"owner": "helm", "name": "hello"})
	var all []string
	for _, secret := range secrets.Items {
		all = append(all, secret.Labels["version"]+" "+secret.Labels["status"])
	}
	slices.Sort(all)
	return all, err
}

// liveSeen returns the data and the version of ConfigMap "seen" on the member.
func (w *world) liveSeen() (*corev1.ConfigMap, error) {
	seen := &corev1.ConfigMap{}
	return seen, w.Get(w.Context(), client.ObjectKey{Namespace: "hello", Name: "seen"}, seen)
}

// wantRelease waits until the member has these release records and this data in ConfigMap "seen".
func (w *world) wantRelease(what string, records []string, data map[string]string) {
	w.Helper()
	w.eventually(what, func() error {
		got, err := w.listReleaseRecords()
		if err != nil {
			return err
		}
		seen, err := w.liveSeen()
		if err != nil {
			return err
		}
		if diff := cmp.Diff(data, seen.Data); diff != "" {
			return fmt.Errorf("data (-want +got):\n%s", diff)
		}
		return checkEqual(records, got)
	})
}

// TestReleaseStaysWhileInventoryOfPushMemberIsLost deletes the inventory while no hub runs, then while a hub runs.
// The chart uses the revision, so another revision also changes its objects.
func TestReleaseStaysWhileInventoryOfPushMemberIsLost(t *testing.T) {
	w := newPrivateWorld(t)
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	options := hub.Options{CacheDir: t.TempDir()}
	stop := w.start(w.plane.Config, options)
	address := w.serveCharts(examples.Chart{Files: map[string]string{"templates/seen.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: seen}\n" +
		"data:\n  password: {{ randAlphaNum 20 }}\n  message: {{ .Values.message }}\n  operation: {{ .Release.Revision }} {{ .Release.IsUpgrade }}\n"}})
	w.registerPushMember("one")
	profile := w.createProfile(deployChart(address, func(c *configv1beta1.HelmChart) { c.Values = "message: first\n" }))
	provisioned := func() {
		t.Helper()
		w.wantFeature(profile, "one", helm(libv1beta1.FeatureStatusProvisioned, ""))
	}
	provisioned()
	seen, err := w.liveSeen()
	w.must(err)
	want := map[string]string{"password": seen.Data["password"], "message": "first", "operation": "1 false"}
	w.wantRelease("installation", []string{"1 deployed"}, want)
	upgrade := func(message string, revision int) {
		t.Helper()
		update(w, profile, func(p *configv1beta1.ClusterProfile) { p.Spec.HelmCharts[0].Values = "message: " + message + "\n" })
		want["message"], want["operation"] = message, fmt.Sprintf("%d true", revision)
		w.wantRelease("upgrade to "+message, []string{fmt.Sprintf("%d superseded", revision-1), fmt.Sprintf("%d deployed", revision)}, want)
		provisioned()
	}
	// drift changes and deletes an object, and waits for the correction.
	drift := func(when string, records []string) {
		t.Helper()
		update(w, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "hello", Name: "seen"}}, func(cm *corev1.ConfigMap) {
			cm.Data["message"] = "drift"
		})
		w.wantRelease(when+": an object was changed", records, want)
		w.must(w.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "hello", Name: "seen"}}))
		w.wantRelease(when+": an object was deleted", records, want)
	}
	restored := func(when string, records []string) {
		t.Helper()
		w.eventually(when, func() error {
			if len(w.listInventories()) == 0 {
				return errors.New("there is no inventory")
			}
			return nil
		})
		provisioned()
		w.wantRelease(when, records, want)
	}

	upgrade("second", 2)
	records := []string{"1 superseded", "2 deployed"}
	before, err := w.liveSeen()
	w.must(err)
	stop()
	w.loseInventories()
	stop = w.start(w.plane.Config, options)
	restored("lost without a hub", records)
	after, err := w.liveSeen()
	w.must(err)
	if before.UID != after.UID {
		t.Error("the object of the release was replaced")
	}
	drift("lost without a hub", records)
	upgrade("third", 3)

	records = []string{"2 superseded", "3 deployed"}
	w.loseInventories()
	drift("lost with a hub", records)
	summary, err := w.getSummary(profile, "one")
	w.must(err)
	annotateProfile(w, profile, summary, "lost")
	w.wantRelease("the profile was touched", records, want)
	stop()
	w.start(w.plane.Config, options)
	restored("the hub was restarted", records)
	drift("the hub was restarted", records)
	upgrade("fourth", 4)

	w.must(w.Delete(t.Context(), profile))
	w.wantNoSummary(profile, "one")
	w.eventually("uninstallation", func() error {
		records, err := w.listReleaseRecords()
		return errors.Join(err, checkEqual(nil, records), w.checkNotFound(&corev1.ConfigMap{}, "hello", "seen"))
	})
	if left := w.listInventories(); len(left) > 0 {
		t.Errorf("%d inventories are left", len(left))
	}
}
