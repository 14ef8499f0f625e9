package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/towline/towline/internal/kube"
)

// compareLeftovers checks that nothing of a member that left is on the member and on the hub, except for:
//
//   - a namespace with objects of others (docs/registration.md, SECURITY.md);
//   - the namespace of the inventory on a member in push mode, but nothing in it;
//   - the Jobs of hooks, which Helm does not delete either;
//   - the agent of a member that left in the round in which it was registered. If it has not connected to the hub,
//     the hub does not wait for it.
//
// Groups, summaries, ClusterConfigurations and the SveltosCluster are compared with the model elsewhere.
func (f *fleet) compareLeftovers(ctx context.Context, m *model, of *member) error {
	if _, isRegistered := m.env[of.name]; isRegistered {
		return nil
	}
	kinds := []schema.GroupVersionKind{
		core("Namespace"), core("ConfigMap"), core("Secret"), core("ServiceAccount"), coordinationv1.SchemeGroupVersion.WithKind("Lease"),
		rbac("Role"), rbac("RoleBinding"), rbac("ClusterRole"), rbac("ClusterRoleBinding"),
	}
	onMember := append(slices.Clone(kinds), core("Service"), core("Pod"), appsv1.SchemeGroupVersion.WithKind("Deployment"))
	onHub := wantNone(ctx, f.admin, kinds, func(o *metav1.PartialObjectMetadata) bool { return isOfCluster(o, of.name) })
	if !m.hadChart[of.name] {
		return named("on the hub", onHub)
	}
	return errors.Join(named("on the hub", onHub), named("on the member", wantNone(ctx, of.admin, onMember, isOfTowline)))
}

// wantNone returns an error with the objects for which isLeft returns true. A namespace with objects of others may
// stay, with its labels.
func wantNone(
	ctx context.Context, admin client.Client, kinds []schema.GroupVersionKind, isLeft func(*metav1.PartialObjectMetadata) bool,
) error {
	objects, err := listMetadata(ctx, admin, kinds)
	if err != nil {
		return err
	}
	isShared := map[string]bool{}
	for _, object := range objects {
		isShared[object.Namespace] = isShared[object.Namespace] || isForeign(&object)
	}
	var left []string
	for _, object := range objects {
		description := describe(object.Kind, &object)
		if object.Kind == "Namespace" && isShared[object.Name] {
			object.Name, object.Labels = "", nil
		}
		if !isForeign(&object) && !isInEveryNamespace(&object) && isLeft(&object) {
			left = append(left, description)
		}
	}
	if len(left) > 0 {
		return fmt.Errorf("objects are left: %q", left)
	}
	return nil
}

// isInEveryNamespace returns whether Kubernetes creates an object in every namespace.
func isInEveryNamespace(object *metav1.PartialObjectMetadata) bool {
	return object.Kind == "ServiceAccount" && object.Name == "default" || object.Kind == "ConfigMap" && object.Name == "kube-root-ca.crt"
}

// isOfTowline returns whether an object on a member has a label or annotation of Towline, or is in the namespace of the
// agent.
func isOfTowline(object *metav1.PartialObjectMetadata) bool {
	keys := slices.AppendSeq(slices.Collect(maps.Keys(object.Labels)), maps.Keys(object.Annotations))
	return object.Namespace == kube.AgentNamespace || object.Labels["app.kubernetes.io/name"] == "sveltos-applier" ||
		slices.ContainsFunc(keys, kube.IsReservedKey)
}

// isOfCluster returns whether an object on the hub has the name of a cluster in its key or in the value of a label, or
// has the claim of the cluster.
func isOfCluster(object *metav1.PartialObjectMetadata, cluster string) bool {
	holder := object.Annotations[kube.AnnotationDeliveryHolder]
	return strings.Contains(client.ObjectKeyFromObject(object).String(), cluster) || strings.HasSuffix(holder, cluster) ||
		slices.Contains(slices.Collect(maps.Values(object.Labels)), cluster)
}
