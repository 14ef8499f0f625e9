package engine

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/towline/towline/internal/kube"
)

func TestMergePastManagers(t *testing.T) {
	t.Parallel()
	const (
		apply  = metav1.ManagedFieldsOperationApply
		update = metav1.ManagedFieldsOperationUpdate
	)
	at := func(second int64) *metav1.Time { return &metav1.Time{Time: time.Unix(second, 0)} }
	entry := func(manager string, operation metav1.ManagedFieldsOperationType, version, fields string) metav1.ManagedFieldsEntry {
		made := metav1.ManagedFieldsEntry{
			Manager: manager, Operation: operation, APIVersion: version, FieldsType: "FieldsV1", FieldsV1: &metav1.FieldsV1{}, Time: at(1),
		}
		made.FieldsV1.SetRawBytes([]byte(fields))
		return made
	}
	status := entry("kubectl", update, "v1", `{"f:status":{}}`)
	status.Subresource = "status"
	later := entry("kubectl-edit", update, "v1beta1", `{"f:b":{}}`)
	later.Time = at(2)
	for name, test := range map[string]struct {
		entries []metav1.ManagedFieldsEntry
		want    []string // manager, operation, version and fields of each entry; nil: no entry is merged
	}{
		"none": {},
		"controllers, status and unknown tools": {entries: []metav1.ManagedFieldsEntry{
			entry("kube-controller-manager", update, "v1", `{"f:a":{}}`), status, entry("helm-controller", apply, "v1", `{"f:a":{}}`),
			entry("terraform", update, "v1", `{"f:a":{}}`),
		}},
		"only ours": {entries: []metav1.ManagedFieldsEntry{entry(kube.FieldManager, apply, "v1", `{"f:a":{}}`)}},
		"all past managers, others and status stay": {
			entries: []metav1.ManagedFieldsEntry{
				entry("helm", apply, "v1", `{"f:a":{"f:x":{}}}`), entry("kubectl-client-side-apply", update, "v1", `{"f:a":{},"f:b":{}}`),
				entry("controller", update, "v1", `{"f:b":{}}`), entry("before-first-apply", update, "v1", `{"f:c":{}}`), status,
			},
			want: []string{
				"controller Update v1 " + `{"f:b":{}}`, "kubectl Update v1 " + `{"f:status":{}}`,
				kube.FieldManager + " Apply v1 " + `{"f:a":{".":{},"f:x":{}},"f:b":{},"f:c":{}}`,
			},
		},
		"ours exists": {
			entries: []metav1.ManagedFieldsEntry{
				entry(kube.FieldManager, apply, "v1", `{"f:a":{}}`), entry("helm", update, "v1", `{"f:b":{}}`), entry("helm", update, "v2", `{"f:c":{}}`),
			},
			want: []string{"helm Update v2 " + `{"f:c":{}}`, kube.FieldManager + " Apply v1 " + `{"f:a":{},"f:b":{}}`},
		},
		"the version that is applied next": {
			entries: []metav1.ManagedFieldsEntry{entry("kubectl", apply, "v1", `{"f:a":{}}`), later},
			want:    []string{"kubectl-edit Update v1beta1 " + `{"f:b":{}}`, kube.FieldManager + " Apply v1 " + `{"f:a":{}}`},
		},
		"the latest version": {
			entries: []metav1.ManagedFieldsEntry{entry("kubectl", apply, "v1alpha1", `{"f:a":{}}`), later},
			want:    []string{"kubectl Apply v1alpha1 " + `{"f:a":{}}`, kube.FieldManager + " Apply v1beta1 " + `{"f:b":{}}`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			merged, err := mergePastManagers(test.entries, "v1")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, e := range merged {
				got = append(got, e.Manager+" "+string(e.Operation)+" "+e.APIVersion+" "+string(e.FieldsV1.GetRawBytes()))
			}
			if diff := cmp.Diff(got, test.want); diff != "" {
				t.Errorf("entries (-got +want):\n%s", diff)
			}
		})
	}
}
