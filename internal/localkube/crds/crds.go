// Package crds installs the CRDs of Towline for tests.
package crds

import (
	"context"
	"io/fs"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
)

// Install creates the CRDs that do not exist, and returns when the API server serves them from its watch cache, which
// rejects requests until it is filled.
func Install(ctx context.Context, c client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	files, err := fs.Glob(crds.FS, "*.yaml")
	if err != nil {
		return err
	}
	var kinds []schema.GroupVersionKind
	for _, file := range files {
		text, err := fs.ReadFile(crds.FS, file)
		if err != nil {
			return err
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(text, crd); err != nil {
			return err
		}
		for _, version := range crd.Spec.Versions {
			kinds = append(kinds, schema.GroupVersionKind{Group: crd.Spec.Group, Version: version.Name, Kind: crd.Spec.Names.ListKind})
		}
		if err := c.Create(ctx, crd); client.IgnoreAlreadyExists(err) != nil {
			return err
		}
	}
	for _, kind := range kinds {
		list := &metav1.PartialObjectMetadataList{}
		list.SetGroupVersionKind(kind)
		err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			return c.List(ctx, list, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: "0"}}) == nil, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
