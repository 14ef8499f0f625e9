package engine

import (
	"context"
	"encoding/json"
	"maps"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

const (
	// labelRetainReplicas with the value "true" on an object of a bundle with RejectUnmanaged leaves the number of
	// replicas of an existing object to its cluster.
	labelRetainReplicas = "resourcetemplate.karmada.io/retain-replicas"
	// retainTries is the maximum number of attempts to apply an object that others change meanwhile.
	retainTries = 5
)

// retains returns whether the cluster decides about the replicas of a target.
func (t *target) retains() bool {
	_, scales := mapOf(t.content["spec"])["replicas"]
	return scales && t.rejectUnmanaged && mapOf(mapOf(t.content["metadata"])["labels"])[labelRetainReplicas] == "true"
}

// applyRetaining applies an existing object without its replicas. If only we have set them, the API server would reset
// omitted replicas to one: then it sends the existing number.
func (p *applyRun) applyRetaining(ctx context.Context, v decision, uid types.UID) (now *live, err error) {
	for range retainTries {
		whole, err := p.engine.member.dynamicClient.Resource(v.resource.GVR).Namespace(v.ref.Namespace).Get(ctx, v.ref.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		body := v.body(v.adopt, uid)
		spec := maps.Clone(mapOf(body["spec"]))
		delete(spec, "replicas")
		body["spec"] = spec
		alone := err == nil && replicasOursAlone(whole)
		if alone {
			spec["replicas"] = mapOf(whole.Object["spec"])["replicas"]
			mapOf(body["metadata"])["resourceVersion"] = whole.GetResourceVersion()
		}
		raw, err := encode(v.ref, body)
		if err != nil {
			return nil, err
		}
		now, err = p.engine.member.apply(ctx, v.target, raw)
		if !alone || !apierrors.IsConflict(err) || whole.GetUID() != uid {
			return now, err
		}
	}
	return nil, errBusy
}

// replicasOursAlone returns whether we have set the replicas of an object, and no other field manager has.
func replicasOursAlone(obj *unstructured.Unstructured) bool {
	ours := false
	for _, entry := range obj.GetManagedFields() {
		var fields struct {
			Spec map[string]json.RawMessage `json:"f:spec"`
		}
		if entry.FieldsV1 == nil || json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
			continue
		}
		if _, sets := fields.Spec["f:replicas"]; !sets {
			continue
		}
		if entry.Manager != kube.FieldManager || !inventory.IsOwnApply(entry) {
			return false
		}
		ours = true
	}
	return ours
}
