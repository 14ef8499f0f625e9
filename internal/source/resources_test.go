package source_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/source"
)

func TestResolveResource(t *testing.T) {
	t.Parallel()
	resolve := func(resource corev1.ObjectReference, restricted string, fields ...string) (source.ResourceReference, error) {
		restrictedContext := templateContext()
		restrictedContext.RestrictedNamespace = restricted
		return source.ResolveResource(configv1beta1.TemplateResourceRef{Resource: resource, WatchFields: fields}, restrictedContext)
	}
	got, err := resolve(corev1.ObjectReference{Kind: "Secret", Name: "{{ .ClusterName }}-login"}, "")
	if want := (source.ResourceReference{APIVersion: "v1", Kind: "Secret", Namespace: "eu", Name: "eu-1-login"}); err != nil || got != want {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
	got, err = resolve(corev1.ObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Namespace: "{{ .Cluster.metadata.labels.env }}", Name: "web"}, "", "spec.replicas")
	if err != nil || got.String() != "apps/v1 Deployment test/web" || got.WatchFields != "spec.replicas" {
		t.Errorf("got %+v, %v", got, err)
	}
	_, err = resolve(corev1.ObjectReference{Kind: "Secret", Namespace: "us", Name: "login"}, "eu")
	wantInvalid(t, err, "Secret us/login: a Profile reads its own namespace eu only")
	_, err = resolve(corev1.ObjectReference{Kind: "Secret"}, "")
	wantInvalid(t, err, "needs a kind and a name")
	_, err = resolve(corev1.ObjectReference{Kind: "Secret", Name: "{{ .MgmtResources.x }}"}, "")
	wantInvalid(t, err, "name of a Secret", `no entry for key "x"`)
	// The API server reads /v1 as v1, so the hub must detect a Secret also with this apiVersion.
	if got, err := resolve(corev1.ObjectReference{APIVersion: "/v1", Kind: "Secret", Name: "a"}, ""); err != nil || got.APIVersion != "v1" {
		t.Errorf("apiVersion /v1: got %+v, %v, want v1", got, err)
	}
	for _, version := range []string{"a/b/c", "apps/", "/"} {
		_, err = resolve(corev1.ObjectReference{APIVersion: version, Kind: "Secret", Name: "a"}, "")
		wantInvalid(t, err, "apiVersion", "is invalid")
	}
	for _, path := range []string{"", "a..b", "a[0]", "{.a}", "a.*"} {
		_, err = resolve(corev1.ObjectReference{Kind: "Secret", Name: "a"}, "", path)
		wantInvalid(t, err, "watchFields")
	}
}

func TestDigestOfUsedContent(t *testing.T) {
	t.Parallel()
	object := func(version, status, label string, replicas int64) map[string]any {
		return map[string]any{
			"metadata": map[string]any{"resourceVersion": version, "labels": map[string]any{"a/b": label}},
			"spec":     map[string]any{"list": []any{map[string]any{"replicas": replicas}}}, "status": status,
		}
	}
	first := object("1", "s", "x", 3)
	for name, test := range map[string]struct {
		reference source.ResourceReference
		other     map[string]any
		isEqual   bool
	}{
		"a new version":        {source.ResourceReference{}, object("2", "s", "x", 3), false},
		"an ignored status":    {source.ResourceReference{IgnoreStatus: true}, object("2", "t", "x", 3), true},
		"a spec":               {source.ResourceReference{IgnoreStatus: true}, object("2", "t", "x", 4), false},
		"another field":        {source.ResourceReference{WatchFields: "spec.list.0.replicas"}, object("2", "t", "y", 3), true},
		"a field":              {source.ResourceReference{WatchFields: ".spec.list.0.replicas"}, object("1", "s", "x", 4), false},
		"a pointer":            {source.ResourceReference{WatchFields: "spec.none\n/metadata/labels/a~1b"}, object("1", "s", "y", 3), false},
		"a part of the status": {source.ResourceReference{IgnoreStatus: true, WatchFields: "status"}, object("1", "t", "x", 3), false},
		"no object":            {source.ResourceReference{WatchFields: "spec.none"}, nil, false},
	} {
		a, errA := test.reference.Digest(first)
		b, errB := test.reference.Digest(test.other)
		if errA != nil || errB != nil || (a == b) != test.isEqual {
			t.Errorf("%s: got %s and %s (%v, %v), want equal: %t", name, a, b, errA, errB, test.isEqual)
		}
	}
}

func TestExpandChartExpandsOptions(t *testing.T) {
	t.Parallel()
	options := &configv1beta1.HelmOptions{Description: "for {{ .ClusterName }}", Labels: map[string]string{"a": "{{ .MgmtResources.Web.metadata.name }}"}}
	got, err := source.ExpandChart(configv1beta1.HelmChart{Options: options}, contextWithResources())
	if err != nil || got.Options.Description != "for eu-1" || got.Options.Labels["a"] != "web" || options.Labels["a"] == "web" {
		t.Errorf("got %+v, %v; options are %+v", got.Options, err, options)
	}
	options.Labels["a"] = "{{ .None }}"
	_, err = source.ExpandChart(configv1beta1.HelmChart{ReleaseNamespace: "n", ReleaseName: "r", Options: options}, templateContext())
	wantInvalid(t, err, "release n/r: ", "options.labels.a")
}
