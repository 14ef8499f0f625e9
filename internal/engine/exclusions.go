package engine

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/kube"
)

// exclusion is a parsed DriftExclusion.
type exclusion struct {
	paths []jsonPath
	// group to name match the fields of an object's identity; nil matches everything.
	group, version, kind, namespace, name *regexp.Regexp
	labels, annotations                   labels.Selector
}

// jsonPath are the unescaped tokens of a JSON pointer.
type jsonPath []string

// CheckDriftExclusions returns the error of the first exclusion that an Engine would refuse, nil if there is none.
func CheckDriftExclusions(all []libv1beta1.DriftExclusion) error {
	_, err := parseExclusions(all)
	return err
}

func parseExclusions(all []libv1beta1.DriftExclusion) ([]exclusion, error) {
	parsed := make([]exclusion, 0, len(all))
	for i, one := range all {
		e, err := parseExclusion(one)
		if err != nil {
			// The error of a regular expression can contain line breaks.
			return nil, fmt.Errorf("driftExclusions[%d]: %s", i, strings.Join(strings.Fields(err.Error()), " "))
		}
		parsed = append(parsed, e)
	}
	return parsed, nil
}

func parseExclusion(from libv1beta1.DriftExclusion) (exclusion, error) {
	e := exclusion{labels: labels.Everything(), annotations: labels.Everything()}
	for _, pointer := range from.Paths {
		path, err := parsePointer(pointer)
		if err != nil {
			return exclusion{}, err
		}
		e.paths = append(e.paths, path)
	}
	if from.Target == nil {
		return e, nil
	}
	var err error
	for _, field := range []struct {
		pattern string
		parsed  **regexp.Regexp
	}{
		{from.Target.Group, &e.group}, {from.Target.Version, &e.version}, {from.Target.Kind, &e.kind},
		{from.Target.Namespace, &e.namespace}, {from.Target.Name, &e.name},
	} {
		if field.pattern == "" {
			continue
		}
		if *field.parsed, err = kube.CompilePattern(field.pattern); err != nil {
			return exclusion{}, fmt.Errorf("target: %w", err)
		}
	}
	if e.labels, err = labels.Parse(from.Target.LabelSelector); err != nil {
		return exclusion{}, fmt.Errorf("target.labelSelector: %w", err)
	}
	if e.annotations, err = labels.Parse(from.Target.AnnotationSelector); err != nil {
		return exclusion{}, fmt.Errorf("target.annotationSelector: %w", err)
	}
	return e, nil
}

// parsePointer returns the path of a JSON pointer. The identity of an object cannot be excluded.
func parsePointer(pointer string) (jsonPath, error) {
	rest, isPointer := strings.CutPrefix(pointer, "/")
	if !isPointer || rest == "" {
		return nil, fmt.Errorf("%q is not a JSON pointer to a field", pointer)
	}
	switch rest {
	case "apiVersion", "kind", "metadata", "metadata/name", "metadata/namespace":
		return nil, fmt.Errorf("%s identifies the object and cannot be excluded", pointer)
	}
	path := strings.Split(rest, "/")
	for i := range path {
		path[i] = strings.NewReplacer("~1", "/", "~0", "~").Replace(path[i])
	}
	return path, nil
}

// excludedPaths returns the paths of an object that the exclusions exclude.
func excludedPaths(all []exclusion, ref kube.Ref, content map[string]any) []jsonPath {
	var paths []jsonPath
	object := &unstructured.Unstructured{Object: content}
	for _, e := range all {
		if e.selects(ref, object) {
			paths = append(paths, e.paths...)
		}
	}
	if ref.Group != "" || ref.Kind != "Secret" {
		return paths
	}
	for i, path := range paths {
		if path[0] == "stringData" { // see convertStringData
			paths[i] = slices.Concat(jsonPath{"data"}, path[1:])
		}
	}
	return paths
}

func (e exclusion) selects(ref kube.Ref, object *unstructured.Unstructured) bool {
	matches := func(pattern *regexp.Regexp, value string) bool { return pattern == nil || pattern.MatchString(value) }
	return matches(e.group, ref.Group) && matches(e.version, ref.Version) && matches(e.kind, ref.Kind) &&
		matches(e.namespace, ref.Namespace) && matches(e.name, ref.Name) &&
		e.labels.Matches(labels.Set(object.GetLabels())) && e.annotations.Matches(labels.Set(object.GetAnnotations()))
}
