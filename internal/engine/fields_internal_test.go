package engine

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestLongFieldsAreNotDecoded decodes managed fields that are larger than any API server stores.
func TestLongFieldsAreNotDecoded(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		length  int
		wantErr bool
	}{{1000, false}, {maxManagedFields, true}} {
		entry := metav1.ManagedFieldsEntry{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(`{"f:aggregationRule":{"f:` + strings.Repeat("a", test.length) + `":{}}}`)}
		if _, err := fieldsOf(entry); (err != nil) != test.wantErr {
			t.Errorf("%d bytes: got error %v", test.length, err)
		}
		role := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ManagedFields: []metav1.ManagedFieldsEntry{entry}}}
		if got := roleStateOf(role); (got == roleOrdinary) != test.wantErr {
			t.Errorf("%d bytes: the role is %v", test.length, got)
		}
	}
}
