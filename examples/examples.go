package examples

import (
	"bytes"
	"embed"
	"fmt"
)

//go:embed all:charts *.yaml
var files embed.FS

// exampleRepository is where the profiles look for the chart, as written in them.
const exampleRepository = "http://127.0.0.1:8879"

// Profiles returns the example profiles, and the ConfigMap that one of them points at, as one YAML stream. The profiles look for
// the chart at repositoryURL; an empty one leaves the address as it is written in the files.
func Profiles(repositoryURL string) ([]byte, error) {
	var stream bytes.Buffer
	for _, name := range []string{"clusterprofile-hello.yaml", "clusterprofile-manifest.yaml"} {
		raw, err := files.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		if repositoryURL != "" {
			raw = bytes.ReplaceAll(raw, []byte(exampleRepository), []byte(repositoryURL))
		}
		stream.WriteString("---\n")
		stream.Write(raw)
	}
	return stream.Bytes(), nil
}
