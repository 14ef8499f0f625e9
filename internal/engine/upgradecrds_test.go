package engine_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/bundle"
)

// chartWithCRD returns a chart with a CRD in its crds directory, and a ConfigMap.
func (c *cluster) chartWithCRD(upgrade bool, shortName string) bundle.Bundle {
	crd := c.definitionOf("Boat", shortName)
	crd.SetAnnotations(map[string]string{"helm.sh/resource-policy": "keep"}) // the annotation in the rendering of the hub
	b := c.chart(bundle.ReleaseOptions{UpgradeCRDs: upgrade}, crd, c.configMap("main", shortName))
	b.Items[0].Release.Data.Paths = []string{"chart/crds/boats.yaml", "chart/templates/main.yaml"}
	return b
}

// getCRD returns the CRD of chartWithCRD and its short name, or nil and "" if it does not exist.
func (c *cluster) getCRD() (crd *unstructured.Unstructured, shortName string) {
	c.t.Helper()
	crd = c.get(definitions, "", c.definitionOf("Boat").GetName())
	if crd == nil {
		return nil, ""
	}
	names, _, err := unstructured.NestedStringSlice(crd.Object, "spec", "names", "shortNames")
	if err != nil || len(names) != 1 {
		c.t.Fatalf("short names: got %q, %v", names, err)
	}
	return crd, names[0]
}

// changeCRD changes the CRD as another client.
func (c *cluster) changeCRD() {
	c.t.Helper()
	body := []byte(`{"spec":{"names":{"shortNames":["changed"]}}}`)
	_, err := c.objects.Resource(definitions).Patch(c.t.Context(), c.definitionOf("Boat").GetName(), types.MergePatchType, body,
		metav1.PatchOptions{FieldManager: "another"})
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) wantCRD(shortName string) {
	c.t.Helper()
	if _, got := c.getCRD(); got != shortName {
		c.t.Errorf("CRD: got %q, want %q", got, shortName)
	}
}

// TestUpgradeLeavesCRDFilesAlone checks that CRDs of a crds directory are created, that their drift is corrected, and
// that an upgrade changes them only with UpgradeCRDs.
func TestUpgradeLeavesCRDFilesAlone(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	line := &meter{}
	e := c.engine(line)
	deploy(t, e, c.chartWithCRD(false, "one"))
	c.wantCRD("one")
	c.changeCRD()
	deploy(t, c.engine(nil), c.chartWithCRD(false, "one"))
	c.wantCRD("one") // corrected, because this revision has applied the CRD

	deploy(t, e, c.chartWithCRD(false, "two"))
	c.wantCRD("one")
	if c.value("main") != "two" {
		t.Errorf("the upgrade did not apply the other objects of the chart: %q", c.value("main"))
	}
	c.changeCRD()
	line.take()
	deploy(t, e, c.chartWithCRD(false, "two"))
	if got := c.listWrites(line); len(got) > 0 {
		t.Errorf("a CRD that this revision has not applied was written: %q", got)
	}
	deploy(t, e, c.chartWithCRD(true, "two"))
	c.wantCRD("two")

	withdraw(t, e, bundle.Withdrawal{ID: c.chartWithCRD(true, "two").ID})
	c.wantCRD("two")
	c.wantAllNames(configMaps)
}

// TestForeignCRDOfACRDFileStays checks that a CRD that existed before the release is neither changed nor deleted.
func TestForeignCRDOfACRDFileStays(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	before := c.create(definitions, c.definitionOf("Boat", "foreign"))
	e := c.engine(nil)
	b := c.chartWithCRD(false, "one")
	deploy(t, e, b)
	deploy(t, c.engine(nil), b)
	c.wantCRD("foreign")
	withdraw(t, e, bundle.Withdrawal{ID: b.ID})
	after, shortName := c.getCRD()
	if after == nil || after.GetUID() != before.GetUID() || shortName != "foreign" || len(after.GetAnnotations()) != len(before.GetAnnotations()) {
		t.Errorf("the CRD was replaced or changed: %v", after)
	}
}
