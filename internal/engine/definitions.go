package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

const (
	// establishLimit is how long a CustomResourceDefinition may take to be established, and its kinds to be served.
	establishLimit = 30 * time.Second
	// definitionReads is how many discovery requests are made before a CustomResourceDefinition itself is read: real ones have
	// hundreds of kilobytes, and reading them again and again slows down the API server that has to establish them.
	definitionReads = 20
)

// isServed returns whether all kinds of a definition are known to be served.
func (p *pass) isServed(v verdict) bool {
	kinds := map[schema.GroupVersionKind]kube.Resource{}
	define(kinds, v.content)
	for gvk := range kinds {
		if _, err := p.engine.member.mapper.Resource(gvk); err != nil {
			return false
		}
	}
	return true
}

// addUnserved notes a definition that was created or changed, or is not served yet: the API server serves its kinds later.
func (p *pass) addUnserved(v verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unserved == nil {
		p.unserved = map[string]map[schema.GroupVersionKind]kube.Resource{}
	}
	kinds := map[schema.GroupVersionKind]kube.Resource{}
	define(kinds, v.content)
	p.unserved[v.ref.Name] = kinds
	for gvk := range kinds {
		p.defined[gvk.GroupKind()] = true
	}
}

// needsServed returns whether objects are of a kind that the pass has defined.
func (p *pass) needsServed(verdicts []verdict) bool {
	return slices.ContainsFunc(verdicts, func(v verdict) bool { return v.verb == write && p.defined[v.ref.GVK().GroupKind()] })
}

// awaitServed waits until all kinds that the pass has defined are served. It returns whether the pass may go on: definitions
// that are refused are failures.
func (p *pass) awaitServed(ctx context.Context) (goOn bool) {
	if len(p.unserved) == 0 {
		return true
	}
	refused := p.engine.member.awaitServed(ctx, p.unserved)
	p.unserved = nil
	p.engine.member.mapper.Reset()
	goOn = true
	for i, change := range p.changes {
		err := refused[change.Ref.Name]
		if err == nil || change.Ref.Group != groupAPIExtensions {
			continue
		}
		err = fmt.Errorf("wait for the definition to be established: %w", err)
		p.changes[i].Action, p.changes[i].Reason = bundle.Failed, err.Error()
		p.failures = append(p.failures, &objectError{ref: change.Ref, err: err})
		goOn = goOn && p.tolerates(err)
	}
	return goOn
}

// awaitServed waits until the API server serves all kinds of CustomResourceDefinitions, which are given by name. It returns
// the reasons of those that it does not serve.
func (m *member) awaitServed(ctx context.Context, pending map[string]map[schema.GroupVersionKind]kube.Resource) map[string]error {
	refused, reasons := map[string]error{}, map[string]string{}
	tries := 0
	err := wait.PollUntilContextTimeout(ctx, pollInterval, establishLimit, true, func(ctx context.Context) (bool, error) {
		tries++
		served := m.servedResources(ctx, pending)
		for name, kinds := range pending {
			if isSubset(kinds, served) {
				delete(pending, name)
				continue
			}
			if tries%definitionReads != 0 {
				continue
			}
			// An APIService may serve the group instead of the definition, or the definition's names are taken.
			established, reason, err := m.definitionState(ctx, name)
			if reasons[name] = reason; established || err != nil {
				refused[name] = err
				delete(pending, name)
			}
		}
		return len(pending) == 0, nil
	})
	for name := range pending {
		refused[name] = fmt.Errorf("%s: %w", cmp.Or(reasons[name], "its kinds are not served"), err)
	}
	return refused
}

// servedResources returns the resources of the groups and versions that the definitions define, as far as they are served.
func (m *member) servedResources(
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
			if m.raw.Get().AbsPath("/apis", gv.Group, gv.Version).Do(ctx).Into(&list) != nil {
				continue // not served yet
			}
			for _, resource := range list.APIResources {
				served[gv.WithResource(resource.Name)] = true
			}
		}
	}
	return served
}

func isSubset(kinds map[schema.GroupVersionKind]kube.Resource, served map[schema.GroupVersionResource]bool) bool {
	for _, resource := range kinds {
		if !served[resource.GVR] {
			return false
		}
	}
	return true
}

// definitionState reads whether a CustomResourceDefinition is established, or the reason why it is not yet. The error means
// that it never will be.
func (m *member) definitionState(ctx context.Context, name string) (established bool, reason string, err error) {
	raw, err := m.raw.Get().AbsPath("/apis", groupAPIExtensions, "v1", "customresourcedefinitions", name).Do(ctx).Raw()
	if err != nil {
		return false, "", err
	}
	return crdState(raw)
}

// crdState reads the conditions of a CustomResourceDefinition.
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
