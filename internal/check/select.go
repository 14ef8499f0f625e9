package check

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"
	"sigs.k8s.io/controller-runtime/pkg/client"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

const (
	// pageSize is the number of objects per request.
	pageSize = 500
	// maxObjectsSize is the maximum size, in bytes of JSON, of the objects that one selector lists, and of the objects
	// that all selectors of a check select. A cluster may return objects without end.
	maxObjectsSize = 16 << 20
)

// listObjects lists the objects with the kind, namespace, name and labels of selector, and returns them as JSON. A kind
// that the cluster does not serve has no objects.
func listObjects(ctx context.Context, member client.Reader, selector *libv1beta1.ResourceSelector) ([]json.RawMessage, error) {
	options, err := listOptions(selector)
	if err != nil {
		return nil, err
	}
	kind := schema.GroupVersionKind{Group: selector.Group, Version: selector.Version, Kind: selector.Kind}
	var objects []json.RawMessage
	size, continueToken := 0, ""
	for {
		page := &unstructured.UnstructuredList{}
		page.SetGroupVersionKind(kind)
		err := member.List(ctx, page, append(options, client.Limit(pageSize), client.Continue(continueToken))...)
		if meta.IsNoMatchError(err) || (apierrors.IsNotFound(err) && continueToken == "") {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", kind.Kind, err)
		}
		for i := range page.Items {
			// Scripts do not need managed fields, which are half of many objects.
			page.Items[i].SetManagedFields(nil)
			raw, err := json.Marshal(page.Items[i].Object)
			if err != nil {
				return nil, fmt.Errorf("encode %s: %w", kube.RefOf(&page.Items[i]), err)
			}
			objects, size = append(objects, raw), size+len(raw)
		}
		if size > maxObjectsSize {
			return nil, fmt.Errorf("list %s: the objects have more than %d MiB", kind.Kind, maxObjectsSize>>20)
		}
		if continueToken = page.GetContinue(); continueToken == "" {
			return objects, nil
		}
	}
}

func listOptions(selector *libv1beta1.ResourceSelector) ([]client.ListOption, error) {
	filters := labels.NewSelector()
	for _, filter := range selector.LabelFilters {
		operation, values := selection.Exists, []string(nil)
		switch filter.Operation {
		case libv1beta1.OperationEqual:
			operation, values = selection.Equals, []string{filter.Value}
		case libv1beta1.OperationDifferent:
			operation, values = selection.NotEquals, []string{filter.Value}
		case libv1beta1.OperationDoesNotHave:
			operation = selection.DoesNotExist
		case libv1beta1.OperationHas:
		default:
			return nil, fmt.Errorf("label filter %q: unknown operation %q", filter.Key, filter.Operation)
		}
		requirement, err := labels.NewRequirement(filter.Key, operation, values)
		if err != nil {
			return nil, fmt.Errorf("label filter %q: %w", filter.Key, err)
		}
		filters = filters.Add(*requirement)
	}
	options := []client.ListOption{client.InNamespace(selector.Namespace), client.MatchingLabelsSelector{Selector: filters}}
	if selector.Name != "" {
		options = append(options, client.MatchingFields{metav1.ObjectNameField: selector.Name})
	}
	return options, nil
}
