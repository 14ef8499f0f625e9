package join

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Request has the fields of a registration that are the same in push and in pull mode.
type Request struct {
	// Namespace and Name are those of the SveltosCluster. Both are DNS labels.
	Namespace string
	Name      string
	// Labels are added to the labels of the SveltosCluster.
	Labels map[string]string
	// Shard is the shard key of the hub that reconciles the cluster. Default: the shard of an existing SveltosCluster, or
	// the default shard.
	Shard string
}

// Validate returns an error for invalid fields, without a connection. The error names the flag and its value.
func (r Request) Validate() error {
	if err := validateLabel("--namespace", r.Namespace); err != nil {
		return err
	}
	if err := validateLabel("--cluster", r.Name); err != nil {
		return err
	}
	if problems := validation.IsValidLabelValue(r.Shard); len(problems) > 0 {
		return fmt.Errorf("--shard: %q is not a key: %s", r.Shard, problems[0])
	}
	for key, value := range r.Labels {
		problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...)
		if len(problems) > 0 {
			return fmt.Errorf("--labels: %q is not a label: %s", key+"="+value, problems[0])
		}
	}
	return nil
}

func validateLabel(flag, value string) error {
	if value == "" {
		return fmt.Errorf("%s is required", flag)
	}
	if problems := validation.IsDNS1123Label(value); len(problems) > 0 {
		return fmt.Errorf("%s: %q is not a DNS label: %s", flag, value, problems[0])
	}
	return nil
}

// key returns "namespace/name".
func (r Request) key() string { return r.Namespace + "/" + r.Name }

// ParseLabels parses "k=v,k2=v2". It trims blanks around keys and values, and returns no labels for an empty text.
func ParseLabels(text string) (map[string]string, error) {
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
