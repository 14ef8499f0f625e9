package hub

import (
	"context"
	"fmt"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/towline/towline/api/crds"
	"github.com/towline/towline/internal/kube"
)

const (
	// establishTimeout is the maximum time until the API server serves a CRD. It is usually a second.
	establishTimeout = time.Minute
	establishPoll    = 100 * time.Millisecond
)

// InstallCRDs applies the CRDs of Towline to the cluster of cfg and returns when the API server serves them. Existing
// CRDs are upgraded. It fails if a CRD is rejected or not served within establishTimeout.
func InstallCRDs(ctx context.Context, cfg *rest.Config) error {
	hubClient, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return fmt.Errorf("create a client of the hub: %w", err)
	}
	files, err := crds.FS.ReadDir(".")
	if err != nil {
		return fmt.Errorf("list CRDs: %w", err)
	}
	var names []string
	for _, file := range files {
		name, err := installCRD(ctx, hubClient, file.Name())
		if err != nil {
			return fmt.Errorf("install CRD %s: %w", file.Name(), err)
		}
		names = append(names, name)
	}
	for _, name := range names {
		if err := waitEstablished(ctx, hubClient, name); err != nil {
			return fmt.Errorf("wait for CRD %s: %w", name, err)
		}
	}
	return nil
}

func installCRD(ctx context.Context, hubClient client.Client, file string) (string, error) {
	raw, err := crds.FS.ReadFile(file)
	if err != nil {
		return "", err
	}
	crd := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(raw, &crd.Object); err != nil {
		return "", err
	}
	err = hubClient.Apply(ctx, client.ApplyConfigurationFromUnstructured(crd), client.FieldOwner(kube.FieldManager), client.ForceOwnership)
	return crd.GetName(), err
}

func waitEstablished(ctx context.Context, hubClient client.Client, name string) error {
	return wait.PollUntilContextTimeout(ctx, establishPoll, establishTimeout, true, func(ctx context.Context) (bool, error) {
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := hubClient.Get(ctx, client.ObjectKey{Name: name}, crd); err != nil {
			return false, err
		}
		for _, condition := range crd.Status.Conditions {
			if condition.Type == apiextensionsv1.Established && condition.Status == apiextensionsv1.ConditionTrue {
				// Discovery has the kind a moment after the CRD is established.
				_, err := hubClient.RESTMapper().RESTMapping(schema.GroupKind{Group: crd.Spec.Group, Kind: crd.Spec.Names.Kind})
				if meta.IsNoMatchError(err) {
					return false, nil
				}
				return err == nil, err
			}
		}
		return false, nil
	})
}
