package inventory_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

func TestFindTrackedKnowsEntriesAndRecordsOfDeployedReleases(t *testing.T) {
	t.Parallel()
	rec := edited(&inventory.Record{})
	release := rec.Releases[0]
	if item, ok := rec.FindTracked(release.SecretRef()); !ok || !item.IsHelmSecret || item.UID != "s" {
		t.Errorf("release record: got %v, %t", item, ok)
	}
	if keys := rec.TrackedOfKind(schema.GroupKind{Kind: "Secret"}); len(keys) != 1 || keys[0] != release.SecretRef() {
		t.Errorf("tracked Secrets: got %v", keys)
	}
	rec.Releases[0].Stage = inventory.StagePreHooks
	if item, ok := rec.FindTracked(release.SecretRef()); ok {
		t.Errorf("record of a release that is not deployed: got %v", item)
	}
}

func TestEditedRecordSharesNothing(t *testing.T) {
	t.Parallel()
	rec := edited(&inventory.Record{})
	next := rec.Edit()
	clear(next.Entries)
	next.FindRelease(rec.Releases[0].Key()).Revision = 7
	if len(rec.Entries) != 1 || rec.Releases[0].Revision != 1 {
		t.Errorf("the record changed: %v, %v", rec.Entries, rec.Releases)
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	entry := func(manager, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationApply, FieldsV1: metav1.NewFieldsV1(fields),
		}
	}
	fingerprint := func(version string, entries ...metav1.ManagedFieldsEntry) string {
		meta := metav1.ObjectMeta{ResourceVersion: version, ManagedFields: entries}
		return inventory.LiveMetaOf(&metav1.PartialObjectMetadata{ObjectMeta: meta}).Fingerprint()
	}
	ours := entry(kube.FieldManager, `{"f:data":{}}`)
	if fingerprint("1", ours) != fingerprint("2", ours, entry("x", `{"f:metadata":{}}`)) {
		t.Error("it changes with the fields of others")
	}
	if fingerprint("1", ours) == fingerprint("1", entry(kube.FieldManager, `{}`)) {
		t.Error("it does not change with a field that was taken over")
	}
	if fingerprint("1") == fingerprint("2") {
		t.Error("without lists of fields it does not change with the version")
	}
}
