package cli

import (
	"fmt"
	"strings"
)

// parseLabels parses "k=v,k2=v2". It trims blanks around keys and values, and returns no labels for an empty text.
func parseLabels(text string) (map[string]string, error) {
	labels := map[string]string{}
	if strings.TrimSpace(text) == "" {
		return labels, nil
	}
	for pair := range strings.SplitSeq(text, ",") {
		parts := strings.Split(pair, "=")
		if len(parts) != 2 || strings.TrimSpace(parts[0]) == "" {
			return nil, fmt.Errorf("invalid key-value pair format: %s", pair)
		}
		labels[strings.TrimSpace(parts[0])] = strings.TrimSpace(parts[1])
	}
	return labels, nil
}
