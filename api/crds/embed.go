package crds

import "embed"

// FS holds the CustomResourceDefinitions of every kind under api/, one YAML file each.
//
//go:embed *.yaml
var FS embed.FS
