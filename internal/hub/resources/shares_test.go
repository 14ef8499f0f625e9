package resources_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
)

// TestKindsOfANamespace has a Profile that refers to more kinds than are watched. Profiles of another namespace and
// ClusterProfiles can still refer to others, and to the same ones.
func TestKindsOfANamespace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	definition := w.boats()
	const kinds = 130 // each version is a kind of its own
	for i := range kinds - 1 {
		version := *definition.Spec.Versions[0].DeepCopy()
		version.Name, version.Storage = fmt.Sprint("v", i+2), false
		definition.Spec.Versions = append(definition.Spec.Versions, version)
	}
	w.install(definition)
	go func() { // the summaries are not reconciled
		for {
			select {
			case <-w.Changed:
			case <-t.Context().Done():
				return
			}
		}
	}()
	boat := func(version int) configv1beta1.TemplateResourceRef {
		return configv1beta1.TemplateResourceRef{Identifier: fmt.Sprint("boat", version), Optional: true, Resource: corev1.ObjectReference{
			APIVersion: fmt.Sprintf("%s.example.org/v%d", w.namespace, version), Kind: "Boat", Name: "anna",
		}}
	}
	// load returns the error of a summary of a Profile in a namespace, or of a ClusterProfile.
	load := func(namespace string, refs ...configv1beta1.TemplateResourceRef) error {
		tmplCtx := w.templateContext()
		tmplCtx.Namespace, tmplCtx.RestrictedNamespace = namespace, namespace
		if namespace == "" {
			tmplCtx.Namespace = w.namespace
		}
		_, err := w.Load(t.Context(), types.NamespacedName{Namespace: tmplCtx.Namespace, Name: "of-" + namespace}, refs, tmplCtx)
		return err
	}
	wantLoaded := func(what, namespace string, refs ...configv1beta1.TemplateResourceRef) {
		t.Helper()
		err := load(namespace, refs...)
		for deadline := time.Now().Add(time.Minute); err != nil; <-time.After(50 * time.Millisecond) {
			if err = load(namespace, refs...); err != nil && time.Now().After(deadline) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	wantTooMany := func(namespace string, refs ...configv1beta1.TemplateResourceRef) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; <-time.After(50 * time.Millisecond) {
			err := load(namespace, refs...)
			if err != nil && strings.Contains(err.Error(), "already refer to") {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("namespace %s refers to too many kinds: %v", namespace, err)
			}
		}
	}
	wantLoaded("the kinds are served", "", boat(kinds))
	wantLoaded("no reference", "")

	var all []configv1beta1.TemplateResourceRef
	for version := range kinds - 5 {
		all = append(all, boat(version+1))
	}
	wantTooMany("hostile", all...)
	wantLoaded("another namespace", "other", boat(kinds), boat(kinds-1))
	wantLoaded("a ClusterProfile", "", boat(kinds-2), boat(1))
	wantLoaded("the hostile namespace with fewer kinds", "hostile", all[:25]...)
	wantLoaded("20 kinds beside 20 that count for another namespace", "third", append(slices.Clone(all[:20]), all[100:120]...)...)
	wantLoaded("the other namespace has no reference", "hostile")
	wantTooMany("third", append(slices.Clone(all[:20]), all[100:121]...)...)
}
