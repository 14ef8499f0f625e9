package stories

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	gocmp "github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

// attackMark is the label that an attack tries to set.
const attackMark = "intruder"

// ownedKinds are the kinds of objects that belong to one cluster.
var ownedKinds = []schema.GroupVersionResource{
	libv1beta1.GroupVersion.WithResource("configurationbundles"),
	libv1beta1.GroupVersion.WithResource("configurationgroups"),
	libv1beta1.GroupVersion.WithResource("sveltosclusters"),
	configv1beta1.GroupVersion.WithResource("clustersummaries"),
	{Version: "v1", Resource: "secrets"},
	{Version: "v1", Resource: "configmaps"},
	{Version: "v1", Resource: "serviceaccounts"},
	{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "roles"},
	{Group: "rbac.authorization.k8s.io", Version: "v1", Resource: "rolebindings"},
}

// kindsWithStatus are the resources of ownedKinds with the subresource status.
var kindsWithStatus = []string{"configurationgroups", "sveltosclusters", "clustersummaries", "clusters", "works"}

// ownedObject is an object of a cluster.
type ownedObject struct {
	resource schema.GroupVersionResource
	object   *unstructured.Unstructured
}

func (p ownedObject) String() string {
	return fmt.Sprintf("%s %s/%s", p.resource.Resource, p.object.GetNamespace(), p.object.GetName())
}

// attempt is one request of an attack.
type attempt struct {
	grant
	try func() error
}

// attack makes every kind of request for b's objects with a's credential. All requests that are not documented must be
// refused, and b's objects must be unchanged.
func (w *world) attack(a, b insider, documented permissions) {
	w.t.Helper()
	before := w.listOwnedObjects(b, a)
	for kind := range map[string]bool{"configurationbundles": true, "configurationgroups": true, "sveltosclusters": true, "secrets": true, "leases": true} {
		if !slices.ContainsFunc(before, func(p ownedObject) bool { return p.resource.Resource == kind }) {
			w.t.Fatalf("%s has no %s to attack", b.cluster, kind)
		}
	}
	w.attackObjects(a, b, before, documented)
	if diff := gocmp.Diff(comparableObjects(before), comparableObjects(w.listOwnedObjects(b, a))); diff != "" {
		w.t.Errorf("%s changed objects of %s (-before +after):\n%s", a.cluster, b.cluster, diff)
	}
}

// attackObjects makes every kind of request for targets, which are b's, with a's credential. All requests that are not
// documented must be refused.
func (w *world) attackObjects(a, b insider, targets []ownedObject, documented permissions) {
	w.t.Helper()
	attempts := slices.Concat(w.onObjects(a, targets), w.onKinds(a, b), w.onTokens(a, b))
	allowed := documented.forAgent(w.t, a)
	attempts = slices.DeleteFunc(attempts, func(x attempt) bool { return allowed.allows(x.grant) })
	answers := make([]error, len(attempts))
	var pending sync.WaitGroup
	gate := make(chan struct{}, parallelRequests)
	for i, x := range attempts {
		pending.Go(func() {
			gate <- struct{}{}
			defer func() { <-gate }()
			answers[i] = x.try()
		})
	}
	pending.Wait()
	for i, err := range answers {
		if !isRefused(err) {
			w.t.Errorf("%s against %s: %+v was answered with %v, want Forbidden", a.cluster, b.cluster, attempts[i].grant, err)
		}
	}
	w.t.Logf("%s against %s: %d requests for %d objects refused", a.cluster, b.cluster, len(attempts), len(targets))
}

// listOwnedObjects reads b's objects as an administrator: objects in its delivery namespace or beside its
// SveltosCluster, except for a's.
func (w *world) listOwnedObjects(b, a insider) []ownedObject {
	w.t.Helper()
	hub := dynamic.NewForConfigOrDie(w.hub.Config)
	var found []ownedObject
	for _, resource := range ownedKinds {
		for _, namespace := range slices.Compact([]string{b.namespace, b.delivery}) {
			list, err := hub.Resource(resource).Namespace(namespace).List(w.t.Context(), metav1.ListOptions{})
			if err != nil {
				w.t.Fatal(err)
			}
			for _, item := range list.Items {
				if namedAfter(item.GetName(), b.cluster) || namespace == b.delivery && !namedAfter(item.GetName(), a.cluster) {
					found = append(found, ownedObject{resource, &item})
				}
			}
		}
	}
	return found
}

func namedAfter(name, cluster string) bool {
	return slices.Contains(strings.Split(name, "-"), cluster)
}

// comparableObjects returns the objects as text, by name. It omits fields and objects that the hub itself changes after
// the agents stop, unless they have attackMark.
func comparableObjects(possessions []ownedObject) map[string]string {
	result := map[string]string{}
	for _, p := range possessions {
		object := p.object.DeepCopy()
		text, _ := json.Marshal(object.Object) // it was read as JSON
		if strings.Contains(string(text), attackMark) {
			result[p.String()] = string(text)
			continue
		}
		switch p.resource.Resource {
		case "sveltosclusters", "clustersummaries":
			unstructured.RemoveNestedField(object.Object, "status")
			object.SetManagedFields(nil)
			object.SetResourceVersion("")
			text, _ = json.Marshal(object.Object)
		case "secrets":
			if strings.HasSuffix(object.GetName(), "-sveltos-registration") {
				continue // the hub creates and deletes it
			}
		}
		result[p.String()] = string(text)
	}
	return result
}

// onObjects returns requests for objects by name.
func (w *world) onObjects(a insider, targets []ownedObject) (attempts []attempt) {
	client, ctx := dynamic.NewForConfigOrDie(a.config), w.t.Context()
	for _, p := range targets {
		c, name := client.Resource(p.resource).Namespace(p.object.GetNamespace()), p.object.GetName()
		marked := p.object.DeepCopy()
		marked.SetLabels(map[string]string{attackMark: attackMark})
		g := grant{p.object.GetNamespace(), resourceName(p.resource.Group, p.resource.Resource), name, ""}
		add := func(verb, subresource string, try func(path ...string) error) {
			g, path := g, []string(nil)
			if g.verb = verb; subresource != "" {
				g.resource, path = g.resource+"/"+subresource, []string{subresource}
			}
			attempts = append(attempts, attempt{g, func() error { return try(path...) }})
		}
		subresources := []string{""}
		if slices.Contains(kindsWithStatus, p.resource.Resource) {
			subresources = append(subresources, "status")
		}
		for _, subresource := range subresources {
			add("get", subresource, func(path ...string) error { _, err := c.Get(ctx, name, metav1.GetOptions{}, path...); return err })
			add("update", subresource, func(path ...string) error {
				_, err := c.Update(ctx, marked, metav1.UpdateOptions{}, path...)
				return err
			})
			add("patch", subresource, func(path ...string) error {
				patch := []byte(`{"metadata":{"labels":{"intruder":"intruder"}},"status":{"failureMessage":"intruder"}}`)
				_, err := c.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, path...)
				return err
			})
		}
		one := metav1.ListOptions{FieldSelector: "metadata.name=" + name}
		add("list", "", func(...string) error { _, err := c.List(ctx, one); return err })
		add("watch", "", func(...string) error { return w.watch(c, one) })
		add("delete", "", func(...string) error { return c.Delete(ctx, name, metav1.DeleteOptions{}) })
	}
	return attempts
}

// onKinds returns requests for all objects of a kind, in a namespace and in all.
func (w *world) onKinds(a, b insider) (attempts []attempt) {
	client, ctx := dynamic.NewForConfigOrDie(a.config), w.t.Context()
	for _, resource := range ownedKinds {
		for _, namespace := range slices.Compact([]string{b.namespace, b.delivery, ""}) {
			var c dynamic.ResourceInterface = client.Resource(resource)
			if namespace != "" {
				c = client.Resource(resource).Namespace(namespace)
			}
			add := func(verb string, try func() error) {
				attempts = append(attempts, attempt{grant{namespace, resourceName(resource.Group, resource.Resource), "", verb}, try})
			}
			add("list", func() error { _, err := c.List(ctx, metav1.ListOptions{}); return err })
			add("watch", func() error { return w.watch(c, metav1.ListOptions{}) })
			if namespace == "" {
				continue
			}
			add("create", func() error {
				object := &unstructured.Unstructured{}
				object.SetAPIVersion(resource.GroupVersion().String())
				object.SetKind("Intruder") // the hub checks the permission before the kind
				object.SetName(b.cluster + "-" + attackMark)
				_, err := c.Create(ctx, object, metav1.CreateOptions{})
				return err
			})
			add("deletecollection", func() error { return c.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}) })
		}
	}
	return attempts
}

func (w *world) watch(c dynamic.ResourceInterface, options metav1.ListOptions) error {
	events, err := c.Watch(w.t.Context(), options)
	if err == nil {
		events.Stop()
	}
	return err
}

// onTokens returns requests for tokens of ServiceAccounts that are not a's.
func (w *world) onTokens(a, b insider) (attempts []attempt) {
	accounts := kubernetes.NewForConfigOrDie(a.config).CoreV1()
	for _, namespace := range slices.Compact([]string{b.namespace, b.delivery}) {
		for _, name := range []string{b.cluster, "default"} {
			g := grant{namespace, "serviceaccounts/token", name, "create"}
			attempts = append(attempts, attempt{g, func() error {
				_, err := accounts.ServiceAccounts(namespace).CreateToken(w.t.Context(), name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
				return err
			}})
		}
	}
	return attempts
}
