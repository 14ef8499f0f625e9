package engine

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	releaseutil "helm.sh/helm/v4/pkg/release/v1/util"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/inventory"
	"github.com/towline/towline/internal/kube"
)

func object(apiVersion, kind, namespace, name string) *unstructured.Unstructured {
	metadata := map[string]any{"name": name}
	if namespace != "" {
		metadata["namespace"] = namespace
	}
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": apiVersion, "kind": kind, "metadata": metadata}}
}

func definition(scope string) *unstructured.Unstructured {
	crd := object("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "boats.example.com")
	crd.Object["spec"] = map[string]any{
		"group": "example.com", "scope": scope, "names": map[string]any{"kind": "Boat", "plural": "boats"},
		"versions": []any{map[string]any{"name": "v1"}},
	}
	return crd
}

func served() kinds {
	known := map[schema.GroupVersionKind]kube.Resource{}
	for gvk, namespaced := range map[schema.GroupVersionKind]bool{
		{Version: "v1", Kind: "Namespace"}: false, {Version: "v1", Kind: "ConfigMap"}: true, {Version: "v1", Kind: "Service"}: true,
		{Group: "apps", Version: "v1", Kind: "Deployment"}:                                true,
		{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}:  false,
		{Group: "admissionregistration.k8s.io", Version: "v1", Kind: "ValidatingWebhook"}: false,
	} {
		known[gvk] = kube.Resource{GVR: gvk.GroupVersion().WithResource(gvk.Kind), Namespaced: namespaced}
	}
	return kinds{exact: known, any: known}
}

func TestPlanTargetsOrdersAndSetsNamespaces(t *testing.T) {
	t.Parallel()
	b := bundle.Bundle{Items: []bundle.Item{
		{Objects: []*unstructured.Unstructured{
			object("admissionregistration.k8s.io/v1", "ValidatingWebhook", "", "w"),
			object("example.com/v1", "Boat", "", "b"),
			object("apps/v1", "Deployment", "", "d"),
			object("v1", "Service", "eu", "s"),
			object("other.example.com/v1", "Unknown", "", "u"),
			object("v1", "ConfigMap", "", "c2"),
		}, Release: &bundle.Release{Name: "r", Namespace: "release"}},
		{Objects: []*unstructured.Unstructured{
			object("v1", "ConfigMap", "", "c1"), definition("Namespaced"), object("v1", "Namespace", "nonsense", "n"),
		}},
	}}
	targets, _, err := planTargets(b, served())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, target := range targets {
		got = append(got, target.ref.String())
	}
	want := []string{
		"ConfigMap release/c2",
		"Service eu/s",
		"Deployment apps release/d",
		"Boat example.com release/b", "Unknown other.example.com u",
		"ValidatingWebhook admissionregistration.k8s.io w",
		// Items are in the order of the bundle if one of them is a Helm release.
		"Namespace n",
		"CustomResourceDefinition apiextensions.k8s.io boats.example.com",
		"ConfigMap default/c1",
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("order (-got +want):\n%s", diff)
	}
	if ns := b.Items[1].Objects[2].GetNamespace(); ns != "nonsense" {
		t.Errorf("the plan changed the bundle: namespace %q", ns)
	}
}

// TestRanksFollowHelmInstallOrder checks that the ranks follow Helm's install order. Only Namespaces and
// CustomResourceDefinitions are before all others.
func TestRanksFollowHelmInstallOrder(t *testing.T) {
	t.Parallel()
	groups := map[string]string{
		"PriorityClass": "scheduling.k8s.io", "NetworkPolicy": "networking.k8s.io", "PodDisruptionBudget": "policy", "StorageClass": "storage.k8s.io",
		"ClusterRole": groupRBAC, "ClusterRoleBinding": groupRBAC, "Role": groupRBAC, "RoleBinding": groupRBAC,
		"DaemonSet": "apps", "ReplicaSet": "apps", "Deployment": "apps", "StatefulSet": "apps", "HorizontalPodAutoscaler": "autoscaling",
		"Job": "batch", "CronJob": "batch", "IngressClass": "networking.k8s.io", "Ingress": "networking.k8s.io", "APIService": "apiregistration.k8s.io",
		"MutatingWebhookConfiguration": "admissionregistration.k8s.io", "ValidatingWebhookConfiguration": "admissionregistration.k8s.io",
	}
	last, lastKind := rankCRD, ""
	for _, kind := range releaseutil.InstallOrder {
		if kind == "Namespace" || kind == "CustomResourceDefinition" || kind == "PodSecurityPolicy" || strings.HasSuffix(kind, "List") {
			continue
		}
		rank := rankOf(schema.GroupKind{Group: groups[kind], Kind: kind})
		if rank < last || rank == rankOther {
			t.Errorf("%s has rank %d and comes after %s with rank %d in Helm", kind, rank, lastKind, last)
		}
		last, lastKind = rank, kind
	}
}

func TestPlanTargetsRefuses(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		objects []*unstructured.Unstructured
		want    string
	}{
		"twice": {
			[]*unstructured.Unstructured{object("v1", "ConfigMap", "", "a"), object("v1", "ConfigMap", "default", "a")},
			"ConfigMap default/a is listed twice: in Secret eu/s and in Secret eu/s",
		},
		"twice in two versions": {
			[]*unstructured.Unstructured{object("example.com/v1", "Boat", "", "a"), object("example.com/v2", "Boat", "", "a")},
			"Boat example.com a is listed twice: in Secret eu/s and in Secret eu/s",
		},
		"no name": {[]*unstructured.Unstructured{object("v1", "ConfigMap", "", "")}, "a ConfigMap in Secret eu/s has no name"},
		"no kind": {[]*unstructured.Unstructured{object("v1", "", "", "a")}, "an object in Secret eu/s has no kind or no apiVersion"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			item := bundle.Item{Objects: test.objects, Reference: bundle.Reference{Kind: "Secret", Namespace: "eu", Name: "s"}}
			_, _, err := planTargets(bundle.Bundle{Items: []bundle.Item{item}}, served())
			if err == nil || err.Error() != test.want {
				t.Errorf("error: got %v, want %s", err, test.want)
			}
		})
	}
}

func TestDecide(t *testing.T) {
	t.Parallel()
	b := bundle.Bundle{
		ID:    bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "mine", Feature: "Resources"},
		Owner: bundle.Owner{Kind: "ClusterProfile", Name: "mine", Tier: 100},
		Items: []bundle.Item{{Objects: []*unstructured.Unstructured{object("v1", "ConfigMap", "eu", "a")}}},
	}
	targets, _, err := planTargets(b, served())
	if err != nil {
		t.Fatal(err)
	}
	mine := func(change func(*live)) *live {
		existing := &live{LiveMeta: inventory.LiveMeta{
			UID: "u", Version: "7", FieldsDigest: "f", Labels: map[string]string{kube.LabelReason: "Resources"}, Annotations: map[string]string{},
		}}
		for name, value := range targets[0].ownership.annotations {
			existing.Annotations[name] = value
		}
		change(existing)
		return existing
	}
	recorded := inventory.Entry{UID: "u", Fingerprint: "f"}
	competingOwner := mine(func(l *live) { l.Annotations[kube.AnnotationRequestor] = "ClusterSummary/other/Resources" })
	for name, test := range map[string]struct {
		seen  *live
		had   inventory.Entry
		want  action
		adopt bool
		cause trigger
	}{
		"competing owner":                          {competingOwner, recorded, actionReject, false, triggerRequest},
		"competing owner, on drift":                {competingOwner, recorded, actionReject, false, triggerDrift},
		"competing owner, new delivery":            {competingOwner, inventory.Entry{}, actionApply, false, triggerDelivery},
		"competing owner, claim of an aborted run": {competingOwner, inventory.Entry{Claim: "7"}, actionApply, false, triggerDrift},
		"competing owner, changed since the claim": {competingOwner, inventory.Entry{Claim: "6"}, actionReject, false, triggerDrift},
		"competing owner, deleted, requested":      {nil, inventory.Entry{CompetingOwner: "x"}, actionApply, false, triggerRequest},
		"competing owner, deleted, on drift":       {nil, inventory.Entry{CompetingOwner: "x"}, actionReject, false, triggerDrift},
		"competing owner, orphaned, on drift":      {&live{LiveMeta: inventory.LiveMeta{UID: "u"}}, inventory.Entry{CompetingOwner: "x"}, actionReject, false, triggerDrift},
		"competing owner of another feature":       {mine(func(l *live) { l.Labels = nil; l.Annotations[kube.AnnotationRequestor] = "x" }), inventory.Entry{}, actionReject, false, triggerDelivery},
		"competing owner, another reference": {mine(func(l *live) {
			l.Annotations[kube.AnnotationRequestor], l.Annotations[kube.AnnotationReferenceName] = "x", "x"
		}), inventory.Entry{}, actionReject, false, triggerDelivery},
		"absent":                                  {nil, recorded, actionApply, false, triggerRequest},
		"as applied":                              {mine(func(*live) {}), recorded, actionNone, false, triggerRequest},
		"fields of another manager":               {mine(func(l *live) { l.FieldsDigest = "g" }), recorded, actionApply, false, triggerRequest},
		"nothing recorded":                        {mine(func(*live) {}), inventory.Entry{}, actionApply, false, triggerRequest},
		"other content":                           {mine(func(l *live) { l.Annotations[kube.AnnotationHash] = "sha256:00" }), recorded, actionApply, false, triggerRequest},
		"no label":                                {mine(func(l *live) { l.Labels = nil }), recorded, actionApply, false, triggerRequest},
		"drift is ignored":                        {mine(func(l *live) { l.FieldsDigest, l.Annotations[kube.AnnotationDriftIgnore] = "g", "" }), recorded, actionNone, false, triggerRequest},
		"no field lists":                          {mine(func(l *live) { l.FieldsDigest = "" }), inventory.Entry{UID: "u", Fingerprint: "version 7"}, actionNone, false, triggerRequest},
		"no lists, changed":                       {mine(func(l *live) { l.FieldsDigest = "" }), inventory.Entry{UID: "u", Fingerprint: "version 6"}, actionApply, false, triggerRequest},
		"adopted":                                 {mine(func(l *live) { l.Annotations[kube.AnnotationAdopted] = "true" }), inventory.Entry{}, actionApply, true, triggerRequest},
		"adopted, annotation lost":                {mine(func(l *live) { l.FieldsDigest = "g" }), inventory.Entry{UID: "u", Fingerprint: "f", Adopted: true}, actionApply, true, triggerRequest},
		"adopted, without annotations":            {&live{LiveMeta: inventory.LiveMeta{UID: "u"}}, inventory.Entry{UID: "u", Fingerprint: "f", Adopted: true}, actionApply, true, triggerRequest},
		"adopted by an aborted run":               {mine(func(*live) {}), inventory.Entry{Adopted: true}, actionApply, true, triggerRequest},
		"adopted, then created again":             {nil, inventory.Entry{UID: "u", Adopted: true}, actionApply, false, triggerRequest},
		"adopted, then with another UID":          {mine(func(l *live) { l.UID = "x" }), inventory.Entry{UID: "u", Adopted: true}, actionApply, false, triggerRequest},
		"competing owner, adopted with other UID": {competingOwner, inventory.Entry{Adopted: true}, actionApply, false, triggerDelivery},
		"unmanaged":                               {&live{LiveMeta: inventory.LiveMeta{UID: "x"}}, inventory.Entry{}, actionApply, true, triggerRequest},
		"role recreated":                          {&live{LiveMeta: inventory.LiveMeta{UID: "x"}, role: roleRecreated}, recorded, actionApply, false, triggerRequest},
		"without annotations":                     {&live{LiveMeta: inventory.LiveMeta{UID: "u"}}, recorded, actionApply, false, triggerRequest},
		"being deleted":                           {mine(func(l *live) { l.Deleting = true }), recorded, actionReject, false, triggerRequest},
		"another profile's": {mine(func(l *live) {
			l.Annotations[kube.AnnotationRequestor], l.Annotations[kube.AnnotationOwnerName] = "x", "x"
		}), inventory.Entry{}, actionReject, false, triggerRequest},
		"without the requestor annotation": {mine(func(l *live) { delete(l.Annotations, kube.AnnotationRequestor) }), inventory.Entry{}, actionApply, false, triggerRequest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := decide(targets[0], test.seen, test.had, runContext{id: b.ID, owner: b.Owner, trigger: test.cause})
			if got.action != test.want || got.adopt != test.adopt {
				t.Errorf("got action %d, adopt %t, error %v; want action %d, adopt %t", got.action, got.adopt, got.err, test.want, test.adopt)
			}
		})
	}
}

// TestDecideAsServiceAccount decides for a ServiceAccount, which can write any annotation: the engine must not delete
// objects of other creators for it.
func TestDecideAsServiceAccount(t *testing.T) {
	t.Parallel()
	b := bundle.Bundle{
		ID: bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "mine", Feature: "Resources"}, Owner: bundle.Owner{Kind: "Profile", Name: "p", Tier: 1},
		Items: []bundle.Item{{Objects: []*unstructured.Unstructured{object("v1", "ConfigMap", "a", "a")}}},
	}
	targets, _, err := planTargets(b, served())
	if err != nil {
		t.Fatal(err)
	}
	existing := func(requestor, owner string) *live {
		return &live{LiveMeta: inventory.LiveMeta{
			UID: "u", Labels: map[string]string{kube.LabelReason: "Resources"},
			Annotations: map[string]string{kube.AnnotationRequestor: requestor, kube.AnnotationOwnerKind: "ClusterProfile", kube.AnnotationOwnerName: owner, kube.AnnotationOwnerTier: "100"},
		}}
	}
	for name, test := range map[string]struct {
		seen  *live
		had   inventory.Entry
		want  action
		adopt bool
	}{
		"it was created":                 {existing(b.ID.String(), "p"), inventory.Entry{UID: "u", Fingerprint: "other"}, actionApply, false},
		"it has forged annotations":      {existing(b.ID.String(), "p"), inventory.Entry{}, actionApply, true},
		"another's with a higher tier":   {existing("ClusterSummary/other/Resources", "x"), inventory.Entry{}, actionReject, false},
		"unmanaged":                      {&live{LiveMeta: inventory.LiveMeta{UID: "u"}}, inventory.Entry{}, actionApply, true},
		"it was created, no annotations": {&live{LiveMeta: inventory.LiveMeta{UID: "u"}}, inventory.Entry{UID: "u"}, actionApply, false},
	} {
		got := decide(targets[0], test.seen, test.had, runContext{id: b.ID, owner: b.Owner, trigger: triggerDelivery, isImpersonated: true})
		if got.action != test.want || got.adopt != test.adopt {
			t.Errorf("%s: got action %d, adopt %t, error %v; want %d, %t", name, got.action, got.adopt, got.err, test.want, test.adopt)
		}
	}
}

func TestDecidePrune(t *testing.T) {
	t.Parallel()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "mine", Feature: "Helm"}
	mine := func(annotations ...string) *live {
		existing := &live{LiveMeta: inventory.LiveMeta{UID: "u", Annotations: map[string]string{kube.AnnotationRequestor: id.String()}}}
		for i := 0; i < len(annotations); i += 2 {
			existing.Annotations[annotations[i]] = annotations[i+1]
		}
		return existing
	}
	for name, test := range map[string]struct {
		had  inventory.Entry
		seen *live
		want pruneAction
	}{
		"deleted":                     {inventory.Entry{UID: "u"}, nil, pruneForget},
		"ours":                        {inventory.Entry{UID: "u"}, mine(), pruneDelete},
		"ours, never recorded":        {inventory.Entry{}, mine(), pruneDelete},
		"not ours, only planned":      {inventory.Entry{}, &live{LiveMeta: inventory.LiveMeta{UID: "u"}}, pruneForget},
		"created again":               {inventory.Entry{UID: "v"}, mine(), pruneForget},
		"taken by another bundle":     {inventory.Entry{UID: "u"}, mine(kube.AnnotationRequestor, "x"), pruneForget},
		"adopted":                     {inventory.Entry{UID: "u"}, mine(kube.AnnotationAdopted, "true"), pruneOrphan},
		"adopted, annotation lost":    {inventory.Entry{UID: "u", Adopted: true}, mine(), pruneOrphan},
		"adopted by an aborted run":   {inventory.Entry{Adopted: true}, mine(), pruneOrphan},
		"adopted, then created again": {inventory.Entry{UID: "v", Adopted: true}, mine(), pruneForget},
		"adopted, then unmanaged":     {inventory.Entry{Adopted: true}, &live{LiveMeta: inventory.LiveMeta{UID: "u"}}, pruneForget},
		"kept by its chart":           {inventory.Entry{UID: "u"}, mine(kube.AnnotationKeep, "keep"), pruneOrphan},

		"created again by role aggregation":          {inventory.Entry{UID: "u"}, &live{LiveMeta: inventory.LiveMeta{UID: "v"}, role: roleRecreated}, pruneDelete},
		"created again by role aggregation, adopted": {inventory.Entry{UID: "u", Adopted: true}, &live{LiveMeta: inventory.LiveMeta{UID: "v"}, role: roleRecreated}, pruneDelete},
		"created again by role aggregation, planned": {inventory.Entry{}, &live{LiveMeta: inventory.LiveMeta{UID: "v"}, role: roleRecreated}, pruneDelete},
		"aggregating role of another client":         {inventory.Entry{UID: "u"}, &live{LiveMeta: inventory.LiveMeta{UID: "v"}, role: roleAggregating}, pruneForget},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, reason := decidePrune(test.had, test.seen, id, inventory.OwnerScope{}); got != test.want {
				t.Errorf("decision: got %d (%s), want %d", got, reason, test.want)
			}
		})
	}
}

func TestKeyLockLocksAllKeysOrNone(t *testing.T) {
	t.Parallel()
	g := newKeyLock[string]()
	unlock, err := g.acquire(t.Context(), "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := g.acquire(ctx, "b", "c"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a taken key: got %v", err)
	}
	if free, err := g.acquire(t.Context(), "c"); err != nil {
		t.Fatal(err)
	} else {
		free()
	}
	unlock()
	if _, err := g.acquire(t.Context(), "a", "b", "c"); err != nil {
		t.Fatal(err)
	}
}
