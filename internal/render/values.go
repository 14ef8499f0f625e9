package render

import (
	"bytes"
	"fmt"

	"helm.sh/helm/v4/pkg/chart/v2/loader"

	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// Values merges the values of a chart in this order: the inline text, which can be a template, the contents without
// templates, and the contents with templates. Later values replace earlier ones; maps are merged and lists are
// replaced. Errors are phase.Invalid and name the source.
func Values(inline string, from []source.Content, subject source.Subject) (map[string]any, error) {
	text, err := subject.Expand("values", inline)
	if err != nil {
		return nil, err
	}
	merged, err := loader.LoadValues(bytes.NewReader([]byte(text)))
	if err != nil {
		return nil, phase.Invalidf("parse values: %w", err)
	}
	for _, content := range plainFirst(from) {
		texts, _, err := expandFiles(content, subject)
		if err != nil {
			return nil, err
		}
		for i, raw := range texts {
			values, err := loader.LoadValues(bytes.NewReader(raw))
			if err != nil {
				return nil, phase.Invalid{Err: fmt.Errorf("parse values in %s, key %s: %w", content.Reference, content.Files[i].Name, err)}
			}
			merged = loader.MergeMaps(merged, values)
		}
	}
	return merged, nil
}

// plainFirst returns from with the contents with templates moved to the end.
func plainFirst(from []source.Content) []source.Content {
	var plain, templates []source.Content
	for _, content := range from {
		if content.Template {
			templates = append(templates, content)
			continue
		}
		plain = append(plain, content)
	}
	return append(plain, templates...)
}
