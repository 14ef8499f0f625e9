package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// establishTimeout is the timeout until a CustomResourceDefinition is established and its kinds are served.
	establishTimeout = time.Minute
	// definitionReadInterval is the number of discovery requests per read of the CustomResourceDefinition itself.
	// Definitions can have hundreds of kilobytes, so frequent reads slow down the API server.
	definitionReadInterval = 20
)

// errUnserved is the error of a definition whose kinds are not served within establishTimeout, although the API server
// did not refuse it.
var errUnserved = errors.New("its kinds are not served yet")

// isServed returns whether the REST mapper knows all kinds of a definition.
func (p *applyRun) isServed(v decision) bool {
	kinds := map[schema.GroupVersionKind]kube.Resource{}
	addServedKinds(kinds, v.content)
	for gvk := range kinds {
		if _, err := p.engine.member.mapper.Resource(gvk); err != nil {
			return false
		}
	}
	return true
}

// addUnserved adds a definition to those that awaitServed waits for: it was created or changed, or is not served yet.
func (p *applyRun) addUnserved(v decision) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unserved == nil {
		p.unserved = map[string]map[schema.GroupVersionKind]kube.Resource{}
	}
	kinds := map[schema.GroupVersionKind]kube.Resource{}
	addServedKinds(kinds, v.content)
	p.unserved[v.ref.Name] = kinds
	for gvk := range kinds {
		p.defined[gvk.GroupKind()] = true
	}
}

// hasDefinedKinds returns whether an object to apply is of a kind that the run has defined.
func (p *applyRun) hasDefinedKinds(decisions []decision) bool {
	return slices.ContainsFunc(decisions, func(v decision) bool { return v.action == actionApply && p.defined[v.ref.GVK().GroupKind()] })
}

// awaitServed waits until all kinds that the run has defined are served. It adds the definitions that are not served to
// p.failures, and returns whether the run may continue.
func (p *applyRun) awaitServed(ctx context.Context) (proceed bool) {
	if len(p.unserved) == 0 {
		return true
	}
	unserved := p.engine.member.pollDefinitions(withAccount(ctx, ""), p.unserved)
	p.unserved = nil
	p.engine.member.mapper.Reset()
	proceed = true
	for i, change := range p.changes {
		err := unserved[change.Ref.Name]
		if err == nil || change.Ref.Group != groupAPIExtensions {
			continue
		}
		err = fmt.Errorf("wait for the definition to be established: %w", err)
		p.changes[i].Action, p.changes[i].Reason = bundle.Failed, err.Error()
		p.failures = append(p.failures, &objectError{ref: change.Ref, err: err})
		proceed = proceed && p.canTolerate(err)
	}
	return proceed
}

// pollDefinitions polls until the API server serves all kinds of the pending CustomResourceDefinitions, for
// establishTimeout at most. The keys are names of definitions. It returns an error for each definition that is not
// served.
func (m *memberClient) pollDefinitions(ctx context.Context, pending map[string]map[schema.GroupVersionKind]kube.Resource) map[string]error {
	failed, reasons := map[string]error{}, map[string]string{}
	tries := 0
	err := wait.PollUntilContextTimeout(ctx, pollInterval, establishTimeout, true, func(ctx context.Context) (bool, error) {
		tries++
		served := m.servedResources(ctx, pending)
		for name, kinds := range pending {
			if areServed(kinds, served) {
				delete(pending, name)
				continue
			}
			if tries%definitionReadInterval != 0 {
				continue
			}
			// The kinds may never be served: an APIService serves the group, or another definition has the names.
			established, reason, err := m.definitionState(ctx, name)
			if reasons[name] = reason; established || err != nil {
				failed[name] = err // nil if it is established
				delete(pending, name)
			}
		}
		return len(pending) == 0, nil
	})
	for name := range pending {
		failed[name] = fmt.Errorf("%w: %s: %w", errUnserved, cmp.Or(reasons[name], "no reason is known"), err)
	}
	return failed
}

// servedResources returns the served resources of the API versions of the pending definitions.
func (m *memberClient) servedResources(
	ctx context.Context, pending map[string]map[schema.GroupVersionKind]kube.Resource,
) map[schema.GroupVersionResource]bool {
	served, read := map[schema.GroupVersionResource]bool{}, map[schema.GroupVersion]bool{}
	for _, kinds := range pending {
		for gvk := range kinds {
			gv := gvk.GroupVersion()
			if read[gv] {
				continue
			}
			read[gv] = true
			var list metav1.APIResourceList
			if m.restClient.Get().AbsPath("/apis", gv.Group, gv.Version).Do(ctx).Into(&list) != nil {
				continue // not served yet
			}
			for _, resource := range list.APIResources {
				served[gv.WithResource(resource.Name)] = true
			}
		}
	}
	return served
}

// areServed returns whether the resources of all kinds are in served.
func areServed(kinds map[schema.GroupVersionKind]kube.Resource, served map[schema.GroupVersionResource]bool) bool {
	for _, resource := range kinds {
		if !served[resource.GVR] {
			return false
		}
	}
	return true
}

// definitionState reads a CustomResourceDefinition and returns its crdState. If the read may succeed later, it returns
// a reason and no error.
func (m *memberClient) definitionState(ctx context.Context, name string) (established bool, reason string, err error) {
	raw, err := m.restClient.Get().AbsPath("/apis", groupAPIExtensions, "v1", "customresourcedefinitions", name).Do(ctx).Raw()
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return false, "", err
	}
	if err != nil {
		return false, err.Error(), nil //nolint:nilerr // it is read again
	}
	return crdState(raw)
}

// crdState returns whether a CustomResourceDefinition is established, or the reason why it is not established yet. An
// error means that it cannot be established.
func crdState(raw []byte) (established bool, reason string, err error) {
	var crd struct {
		Status struct {
			Conditions []metav1.Condition `json:"conditions"`
		} `json:"status"`
	}
	if err := json.Unmarshal(raw, &crd); err != nil {
		return false, "", fmt.Errorf("decode its conditions: %w", err)
	}
	if c := meta.FindStatusCondition(crd.Status.Conditions, "NamesAccepted"); c != nil && c.Status == metav1.ConditionFalse {
		return false, "", errors.New(c.Message)
	}
	c := meta.FindStatusCondition(crd.Status.Conditions, "Established")
	if c == nil {
		return false, "it has no condition yet", nil
	}
	return c.Status == metav1.ConditionTrue, c.Message, nil
}
