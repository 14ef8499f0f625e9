package hub_test

import (
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/hub"
	"github.com/towline/towline/internal/localkube"
)

func TestInstallCRDsUpgradesExistingCRDs(t *testing.T) {
	t.Parallel()
	w := newWorldOn(t, localkube.ForTest(t, localkube.Named("upgrade")))
	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	cluster := w.createMember("stays", nil)

	// An earlier release: a column less, a field less.
	crd := &apiextensionsv1.CustomResourceDefinition{}
	name := client.ObjectKey{Name: "sveltosclusters." + libv1beta1.GroupName}
	w.must(w.Get(t.Context(), name, crd))
	columns := len(crd.Spec.Versions[0].AdditionalPrinterColumns)
	status := func() map[string]apiextensionsv1.JSONSchemaProps {
		return crd.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["status"].Properties
	}
	crd.Spec.Versions[0].AdditionalPrinterColumns = crd.Spec.Versions[0].AdditionalPrinterColumns[1:]
	delete(status(), "apiVersions")
	w.must(w.Update(t.Context(), crd))

	w.must(hub.InstallCRDs(t.Context(), w.plane.Config))
	w.must(w.Get(t.Context(), name, crd))
	if got := len(crd.Spec.Versions[0].AdditionalPrinterColumns); got != columns {
		t.Errorf("columns after the upgrade: got %d, want %d", got, columns)
	}
	if _, ok := status()["apiVersions"]; !ok {
		t.Error("the field apiVersions is not back")
	}
	w.must(w.Get(t.Context(), client.ObjectKeyFromObject(cluster), cluster))
}
