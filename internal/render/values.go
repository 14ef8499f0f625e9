package render

import (
	"bytes"
	"errors"
	"fmt"

	"helm.sh/helm/v4/pkg/chart/v2/loader"

	"github.com/towline/towline/internal/kube"
	"github.com/towline/towline/internal/phase"
	"github.com/towline/towline/internal/source"
)

// Values merges the values of a chart in this order: the inline text, which can be a template, the contents without
// templates, and the contents with templates. Later values replace earlier ones; maps are merged and lists are
// replaced. Errors name the source. They are phase.TerminalError, except errors of kube.ContentReservation.Add.
func Values(inline string, from []source.Content, tmplCtx source.TemplateContext) (map[string]any, error) {
	text, err := tmplCtx.Expand("values", inline)
	if err != nil {
		return nil, err
	}
	merged, err := loadValues([]byte(text), tmplCtx.Memory)
	if kube.IsMemoryError(err) {
		return nil, fmt.Errorf("parse values: %w", err)
	}
	if err != nil {
		err = phase.TerminalErrorf("parse values: %w", err)
		if tmplCtx.Resources.HasSecret {
			err = source.HideDetails("parse values", err)
		}
		return nil, err
	}
	for _, content := range plainFirst(from) {
		texts, _, err := expandFiles(content, tmplCtx)
		if err != nil {
			return nil, err
		}
		for i, raw := range texts {
			values, err := loadValues(raw, tmplCtx.Memory)
			origin := "parse values in " + originOf(content, content.Files[i])
			if kube.IsMemoryError(err) {
				return nil, fmt.Errorf("%s: %w", origin, err)
			}
			if err != nil {
				err = phase.TerminalErrorf("%s: %w", origin, err)
				if content.WithSensitivityOf(tmplCtx).Sensitive {
					err = source.HideDetails(origin, err)
				}
				return nil, err
			}
			merged = loader.MergeMaps(merged, values)
		}
	}
	return merged, nil
}

// loadValues parses values. The memory of the result stays reserved.
func loadValues(text []byte, reserved *kube.ContentReservation) (map[string]any, error) {
	_, needed, err := reserved.AddForYAML(text)
	if err != nil {
		return nil, err
	}
	values, err := loader.LoadValues(bytes.NewReader(text))
	reserved.Subtract(max(0, needed-kube.MemoryOfValue(values)))
	if err != nil {
		return nil, errors.New(kube.OneLine(err.Error())) // the error can quote several lines of the text
	}
	return values, nil
}

// plainFirst returns from with the templates last.
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
