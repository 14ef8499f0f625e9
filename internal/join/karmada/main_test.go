package karmada_test

import (
	"context"
	"encoding/json"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	clusterv1alpha1 "github.com/towline/towline/api/cluster/v1alpha1"
	"github.com/towline/towline/internal/join/karmada"
	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/localkube"
	"github.com/towline/towline/internal/localkube/crds"
)

// world is a hub and a member. The member is a hub, too: of itself.
type world struct {
	hub, member             *localkube.Plane
	hubClient, memberClient client.Client
}

var theWorld = sync.OnceValues(func() (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	w := &world{}
	var err error
	if w.member, err = localkube.Start(ctx, localkube.Options{Name: "member"}); err != nil {
		return nil, err
	}
	if w.hub, err = localkube.Start(ctx, localkube.Options{Name: "hub"}); err != nil {
		return nil, err
	}
	if w.hubClient, err = install(ctx, w.hub.Config); err != nil {
		return nil, err
	}
	w.memberClient, err = install(ctx, w.member.Config)
	return w, err
})

// planes returns the hub and the member that the tests share. The lifelines stop them with the binary.
func planes(t *testing.T) *world {
	t.Helper()
	w, err := theWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func install(ctx context.Context, config *rest.Config) (client.Client, error) {
	hubClient, err := client.New(config, client.Options{Scheme: kube.Scheme()})
	if err != nil {
		return nil, err
	}
	return hubClient, crds.Install(ctx, hubClient)
}

// turn lets one test at a time join the member, which can be in the fleet once.
var turn sync.Mutex

// alone gives the member to a test until it ends.
func alone(t *testing.T) *world {
	t.Helper()
	w := planes(t)
	turn.Lock()
	t.Cleanup(turn.Unlock)
	for _, reader := range []client.Client{w.hubClient, w.memberClient} {
		awaitDeletedNamespaces(t, reader)
	}
	return w
}

// awaitDeletedNamespaces waits until no namespace of a former test is being deleted.
func awaitDeletedNamespaces(t *testing.T, reader client.Client) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, time.Minute, true, func(ctx context.Context) (bool, error) {
		namespaces := &corev1.NamespaceList{}
		err := reader.List(ctx, namespaces)
		isDeleting := func(namespace corev1.Namespace) bool { return !namespace.DeletionTimestamp.IsZero() }
		return !slices.ContainsFunc(namespaces.Items, isDeleting), err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) joinRequest(name string) karmada.JoinRequest {
	return karmada.JoinRequest{Hub: w.hub.Config, Member: w.member.Config, Name: name}
}

func (w *world) unjoinRequest(name string) karmada.UnjoinRequest {
	return karmada.UnjoinRequest{Hub: w.hub.Config, Member: w.member.Config, Name: name, Timeout: 20 * time.Second, Progress: func(string) {}}
}

// everything returns all objects in a cluster, in JSON, of the kinds that a registration creates, including the objects
// that controllers create in every namespace.
func everything(t *testing.T, reader client.Client) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, list := range []client.ObjectList{
		&corev1.NamespaceList{}, &corev1.ServiceAccountList{}, &corev1.SecretList{}, &corev1.ConfigMapList{}, &rbacv1.ClusterRoleList{},
		&rbacv1.ClusterRoleBindingList{}, &rbacv1.RoleList{}, &rbacv1.RoleBindingList{}, &clusterv1alpha1.ClusterList{},
	} {
		if err := reader.List(t.Context(), list); err != nil {
			t.Fatal(err)
		}
		items, err := meta.ExtractList(list)
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range items {
			obj := item.(client.Object)
			text, err := json.Marshal(obj)
			if err != nil {
				t.Fatal(err)
			}
			ref := kindOf(t, reader, obj)
			all[ref+" "+client.ObjectKeyFromObject(obj).String()] = string(text)
		}
	}
	return all
}

func kindOf(t *testing.T, reader client.Client, obj client.Object) string {
	t.Helper()
	gvk, err := reader.GroupVersionKindFor(obj)
	if err != nil {
		t.Fatal(err)
	}
	return gvk.Kind
}

// wantSame waits until a cluster has the same objects as before, byte for byte.
func wantSame(t *testing.T, what string, reader client.Client, before map[string]string) {
	t.Helper()
	diff := ""
	err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, 20*time.Second, true, func(context.Context) (bool, error) {
		diff = cmp.Diff(before, everything(t, reader))
		return diff == "", nil
	})
	if err != nil {
		t.Errorf("%s (-before +after):\n%s", what, diff)
	}
}
